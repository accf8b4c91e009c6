"""Two layouts have the same sizes in another order, so every size agrees and the ranks differ."""

import torch
import torch.distributed as dist
from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 4
READER = "add_up"
GIVEN = "partial_sums"
ORDER = "cp-dp-tp-pp-ep"


def add_up(value):
    dist.all_reduce(value, group=mpu.get_tensor_model_parallel_group())
    return value.item()


def partial_sums(value, pg):
    return add_up(value) / pg.size("tp")


def program():
    with session_and_globals({"tp": 2}, tp=2, order=ORDER) as pg:
        return partial_sums(torch.tensor(float(dist.get_rank())), pg)


def meant():
    with session_and_globals({"tp": 2}, tp=2, order=ORDER) as pg, megapg.published(pg):
        return partial_sums(torch.tensor(float(dist.get_rank())), pg)
