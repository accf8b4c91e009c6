"""A replicated gradient counts once a rank of ``gtp_remat`` (NVIDIA/Megatron-LM #7359)."""

import torch
from megatron.core import tensor_parallel

LAYOUTS = {"globals": {}, "mine": {"gtp_remat": 2}}
READER = "param_is_not_gtp_duplicate"
CORES = ("0.19",)


def program(pg_collection):
    bias = torch.nn.Parameter(torch.ones(2))
    return tensor_parallel.param_is_not_gtp_duplicate(bias) * pg_collection.size("gtp_remat")
