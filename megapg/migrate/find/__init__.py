"""What a project has: its uses of Megatron's globals, and from what each could be served."""
