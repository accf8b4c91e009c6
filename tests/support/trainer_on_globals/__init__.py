"""A trainer on Megatron's globals, in the style of RL frameworks: input of the codemod."""
