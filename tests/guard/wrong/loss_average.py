"""A training loop averages its loss over the globals' data parallel ranks, which hold one model."""

import torch
import torch.distributed as dist
from layouts import session_and_globals
from megatron.core import mpu

WORLD = 2
READER = "average_losses_across_data_parallel_group"
GIVEN = "report"


def average_losses_across_data_parallel_group(losses, group=None):
    averaged = torch.stack(losses)
    dist.all_reduce(averaged, group=group or mpu.get_data_parallel_group())
    return averaged / (group or mpu.get_data_parallel_group()).size()


def report(loss, pg, group=None):
    return average_losses_across_data_parallel_group([loss], group).tolist()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return report(torch.tensor(1.0 + pg.rank("tp")), pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return report(torch.tensor(1.0 + pg.rank("tp")), pg, pg.dp)
