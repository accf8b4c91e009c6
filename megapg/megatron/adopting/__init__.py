"""Ownership of groups that Megatron-core made: closing, suspending and recreating them."""
