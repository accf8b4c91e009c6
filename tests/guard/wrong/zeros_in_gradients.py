"""Zeros of a replicated gradient are counted on every rank: ``count_zeros_fp32`` got no group."""

import torch
from megatron.core.optimizer.clip_grads import count_zeros_fp32

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "param_is_not_tensor_parallel_duplicate"


def program(pg_collection):
    bias = torch.nn.Parameter(torch.ones(4))
    bias.grad = torch.tensor([0.0, 0.0, 1.0, 1.0])
    return float(count_zeros_fp32([bias], pg_collection.mp))
