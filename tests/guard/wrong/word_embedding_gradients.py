"""First and last stage do not add up their embedding gradients: the globals have no pipeline."""

import torch
import torch.distributed as dist
from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 2
READER = "reduce_embedding"
GIVEN = "finish"


def reduce_embedding(gradient):
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(gradient, group=mpu.get_embedding_group())
    return gradient


class Stage:
    def __init__(self, pp_group):
        self.pp_group = pp_group

    def finish(self, gradient):
        return reduce_embedding(gradient).item()


def program():
    with session_and_globals({"pp": 1}, pp=2) as pg:
        return Stage(pg.pp).finish(torch.tensor(1.0 + pg.rank("pp")))


def meant():
    with session_and_globals({"pp": 1}, pp=2) as pg, megapg.published(pg):
        return Stage(pg.pp).finish(torch.tensor(1.0 + pg.rank("pp")))
