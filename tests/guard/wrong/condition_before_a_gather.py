"""A gather is left out: the condition before it asks the globals' size (as in MegatronApp)."""

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "logits"
GIVEN = "logits"


class Head:
    def __init__(self, tp_group):
        self.tp_group = tp_group

    def logits(self, part):
        if mpu.get_tensor_model_parallel_world_size() > 1:
            part = gather_from_tensor_model_parallel_region(part, group=self.tp_group)
        return part.tolist()


def program(pg):
    return Head(pg.tp).logits(torch.full((2,), pg.rank("tp")))
