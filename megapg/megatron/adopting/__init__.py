"""Owning the groups that Megatron-core made: closing, suspending and making them anew."""
