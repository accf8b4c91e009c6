"""Checkpoints on Megatron's own disk format, with explicit process groups."""
