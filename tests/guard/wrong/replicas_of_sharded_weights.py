"""A replicated gradient counts once a rank of ``gtp_remat`` (NVIDIA/Megatron-LM #7359)."""

import torch
from layouts import session_and_globals
from megatron.core import tensor_parallel

import megapg

WORLD = 2
READER = "param_is_not_gtp_duplicate"
GIVEN = "counted"
CORES = ("0.19",)


def counted(pg_collection):
    bias = torch.nn.Parameter(torch.ones(2))
    return tensor_parallel.param_is_not_gtp_duplicate(bias) * pg_collection.size("gtp_remat")


def program():
    with session_and_globals({}, gtp_remat=2) as pg:
        return counted(pg)


def meant():
    with session_and_globals({}, gtp_remat=2) as pg, megapg.published(pg):
        return counted(pg)
