"""Python source: files, scopes, the order of statements, imports. Nothing here knows Megatron."""
