"""A trainer on Megatron's globals, as RL frameworks write them: it is what the codemod is given."""
