"""A batch function broadcasts from the first rank of the globals' tp group: each reads its own."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "get_batch"
GIVEN = "step"


def get_batch(data):
    batch = next(data)
    source = mpu.get_tensor_model_parallel_src_rank()
    dist.broadcast(batch, source, group=mpu.get_tensor_model_parallel_group())
    return batch


def step(data, pg_collection):
    batch = get_batch(data)
    dist.all_reduce(batch, group=pg_collection.tp)
    return batch.tolist()


def program(pg):
    return step(iter([torch.arange(4) + 100 * pg.rank("tp")]), pg)
