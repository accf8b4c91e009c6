"""Megatron-core seeds the tracker by the globals' tp rank: all ranks draw the same dropout mask."""

import torch
from layouts import session_and_globals
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

WORLD = 2
READER = "model_parallel_cuda_manual_seed"
GIVEN = "seed_model"


def seed_model(pg_collection, **ranks):
    model_parallel_cuda_manual_seed(1234, **ranks)
    with get_cuda_rng_tracker().fork():
        return torch.rand(3).tolist()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return seed_model(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return seed_model(
            pg, tp_rank=pg.rank("tp"), ep_rank=pg.rank("ep"), etp_rank=pg.rank("expt_tp")
        )
