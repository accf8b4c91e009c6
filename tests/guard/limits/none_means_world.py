"""A getter answers None before anything is initialised, and torch takes None for all ranks."""

import torch
import torch.distributed as dist
from layouts import opened
from megatron.core import mpu


def total(value, group):
    dist.all_reduce(value, group=group)
    return value.item()


def program():
    with opened(first={}, second={"tp": 2}):
        return total(torch.ones(()), mpu.get_tensor_model_parallel_group(check_initialized=False))


def meant():
    with opened(first={}, second={"tp": 2}) as (policy, _):
        return total(torch.ones(()), policy.tp)
