"""Two data parallel ranks get one batch: ``broadcast_data`` uses the globals' tp group."""

import torch
from megatron.core.tensor_parallel import broadcast_data

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "next_batch"


def next_batch(data, pg_collection):
    batch = broadcast_data(["tokens"], data, torch.int64)
    return (batch["tokens"] * pg_collection.size("dp")).tolist()


def program(pg):
    return next_batch({"tokens": torch.arange(3) + 10 * pg.rank("dp")}, pg)
