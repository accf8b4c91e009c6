"""Two layouts have the same sizes in another order, so every size agrees and the ranks differ."""

import torch
import torch.distributed as dist
from megatron.core import mpu

WORLD = 4
LAYOUTS = {"globals": {"tp": 2}, "mine": {"tp": 2, "order": "cp-dp-tp-pp-ep"}}
READER = "add_up"
GIVEN = "partial_sums"


def add_up(value):
    dist.all_reduce(value, group=mpu.get_tensor_model_parallel_group())
    return value.item()


def partial_sums(value, pg):
    return add_up(value) / pg.size("tp")


def program(pg):
    return partial_sums(torch.tensor(float(dist.get_rank())), pg)
