"""Zeros of a replicated gradient are counted on every rank: ``count_zeros_fp32`` got no group."""

import torch
from layouts import session_and_globals
from megatron.core.optimizer.clip_grads import count_zeros_fp32

WORLD = 2
READER = "param_is_not_tensor_parallel_duplicate"
GIVEN = "log_zeros"


def log_zeros(pg_collection, **group):
    bias = torch.nn.Parameter(torch.ones(4))
    bias.grad = torch.tensor([0.0, 0.0, 1.0, 1.0])
    return float(count_zeros_fp32([bias], pg_collection.mp, **group))


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return log_zeros(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return log_zeros(pg, tp_group=pg.tp)
