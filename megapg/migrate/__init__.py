"""The codemod that moves code off Megatron's globals; it runs where torch is not installed."""
