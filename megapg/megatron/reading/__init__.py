"""The collection of a function: its argument, that of its model, or Megatron's globals."""
