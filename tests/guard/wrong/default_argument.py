"""A gather takes an optional group, and its caller has a group and does not pass it."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}
READER = "gather_scores"
GIVEN = "rank_answers"


def gather_scores(scores, group=None):
    if group is None:
        group = mpu.get_data_parallel_group()
    parts = [torch.empty_like(scores) for _ in range(group.size())]
    dist.all_gather(parts, scores, group=group)
    return torch.cat(parts)


def rank_answers(scores, dp_group):
    return [*gather_scores(scores).tolist(), dp_group.size()]


def program(pg):
    return rank_answers(torch.tensor([float(pg.rank("dp"))]), pg.dp)
