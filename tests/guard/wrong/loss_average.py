"""A training loop averages its loss over the globals' data parallel ranks, which hold one model."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "average_losses_across_data_parallel_group"


def average_losses_across_data_parallel_group(losses):
    averaged = torch.stack(losses)
    dist.all_reduce(averaged, group=mpu.get_data_parallel_group())
    return averaged / mpu.get_data_parallel_world_size()


def program(pg):
    loss = torch.tensor(1.0 + pg.rank("tp"))
    return average_losses_across_data_parallel_group([loss]).tolist()
