"""Two data parallel ranks get one batch: ``broadcast_data`` uses the globals' tp group."""

import torch
from layouts import session_and_globals
from megatron.core.tensor_parallel import broadcast_data

import megapg

WORLD = 2
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "next_batch"


def next_batch(data, pg_collection):
    batch = broadcast_data(["tokens"], data, torch.int64)
    return (batch["tokens"] * pg_collection.size("dp")).tolist()


def program():
    with session_and_globals({"tp": 2}) as pg:
        return next_batch({"tokens": torch.arange(3) + 10 * pg.rank("dp")}, pg)


def meant():
    with session_and_globals({"tp": 2}) as pg, megapg.published(pg):
        return next_batch({"tokens": torch.arange(3) + 10 * pg.rank("dp")}, pg)
