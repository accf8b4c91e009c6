"""A gather is left out: the condition before it asks the globals' size (as in MegatronApp)."""

import torch
from layouts import session_and_globals
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

import megapg

WORLD = 2
READER = "logits"
GIVEN = "logits"


class Head:
    def __init__(self, tp_group):
        self.tp_group = tp_group

    def logits(self, part):
        if mpu.get_tensor_model_parallel_world_size() > 1:
            part = gather_from_tensor_model_parallel_region(part, group=self.tp_group)
        return part.tolist()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return Head(pg.tp).logits(torch.full((2,), pg.rank("tp")))


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.published(pg):
        return Head(pg.tp).logits(torch.full((2,), pg.rank("tp")))
