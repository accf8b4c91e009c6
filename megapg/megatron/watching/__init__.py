"""Who still reads Megatron's globals: one hook, which records the reads or refuses them."""
