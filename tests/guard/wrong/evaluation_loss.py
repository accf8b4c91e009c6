"""An evaluation divides by the globals' data parallel size; the sum is over the model's."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}
READER = "<genexpr>"
GIVEN = "evaluate"


def evaluate(batches, pg_collection):
    total = torch.tensor(0.0)
    for batch in batches:
        loss = batch.mean()
        dist.all_reduce(loss, group=pg_collection.dp)
        total += loss
    return sum(part / mpu.get_data_parallel_world_size() for part in (total.item(), 1.0))


def program(pg):
    return evaluate([torch.ones(2), torch.full((2,), 3.0)], pg)
