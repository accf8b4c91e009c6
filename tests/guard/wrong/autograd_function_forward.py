"""An autograd function gets the group and keeps it in ``ctx``, and its forward asks the globals."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "forward"
GIVEN = "forward"


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, group):
        ctx.tp_group = group
        total = value.clone()
        dist.all_reduce(total, group=mpu.get_tensor_model_parallel_group())
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def program(pg):
    return Total.apply(torch.ones(2, requires_grad=True), pg.tp).tolist()
