"""A hook on a gradient averages over the globals' data parallel ranks, which hold other shards."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "average"
GIVEN = "train"


def average(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient, group=mpu.get_data_parallel_group())
    return gradient / mpu.get_data_parallel_world_size()


def train(weight, scale, pg_collection):
    weight.register_hook(average)
    (weight * scale).sum().backward()
    return [*weight.grad.tolist(), pg_collection.size("dp")]


def program(pg):
    return train(torch.ones(2, requires_grad=True), 1.0 + pg.rank("tp"), pg)
