"""A lambda scales the learning rate by the globals' dp size, called by a schedule of torch."""

import torch
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "<lambda>"
GIVEN = "rates"


def rates(steps, pg):
    weight = torch.nn.Parameter(torch.zeros(pg.size("tp")))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scale = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: mpu.get_data_parallel_world_size() / (1 + step)
    )
    return scale.get_last_lr()[:steps]


def program(pg):
    return rates(1, pg)
