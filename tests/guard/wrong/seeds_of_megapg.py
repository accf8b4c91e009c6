"""``seed_all`` gets None in place of the collection, and seeds by the globals' tp rank."""

import torch
from layouts import session_and_globals
from megatron.core.tensor_parallel import get_cuda_rng_tracker

import megapg

WORLD = 2
READER = "start"
GIVEN = "start"


def start(pg, passed):
    megapg.seed_all(1234, passed)
    with get_cuda_rng_tracker().fork():
        return [*torch.rand(2).tolist(), pg.size("tp")]


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return start(pg, None)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return start(pg, pg)
