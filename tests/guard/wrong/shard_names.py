"""Both tensor parallel ranks name their file ``mp_rank_00``: the name is of the globals' ranks."""

from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "checkpoint_name"
GIVEN = "save"


def checkpoint_name(step):
    tensor, stage = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
    return f"iter_{step:07d}/mp_rank_{tensor:02d}_{stage:03d}"


class Saver:
    def __init__(self, groups):
        self.groups = groups

    def save(self, step):
        return checkpoint_name(step)


def program(pg):
    return Saver(pg).save(5)
