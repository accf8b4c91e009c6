"""``seed_all`` gets None in place of the collection, and seeds by the globals' tp rank."""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "program"


def program(pg):
    megapg.seed_all(1234, None)
    with get_cuda_rng_tracker().fork():
        return [*torch.rand(2).tolist(), pg.size("tp")]
