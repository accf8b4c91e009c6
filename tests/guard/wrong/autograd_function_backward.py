"""The backward of an autograd function asks the globals, and its ``ctx`` keeps the group."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "backward"
GIVEN = "backward"


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, pg_collection):
        ctx.pg_collection = pg_collection
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=mpu.get_tensor_model_parallel_group())
        return total, None


def gradient(groups):
    value = torch.ones(2, requires_grad=True)
    Copy.apply(value, groups[0]).sum().backward()
    return value.grad.tolist()


def program(pg):
    return gradient([pg])
