"""Megatron-core seeds the tracker by the globals' tp rank: all ranks draw the same dropout mask."""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "model_parallel_cuda_manual_seed"


def program(pg_collection):
    model_parallel_cuda_manual_seed(1234)
    with get_cuda_rng_tracker().fork():
        return torch.rand(3).tolist()
