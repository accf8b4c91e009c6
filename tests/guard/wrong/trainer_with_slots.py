"""A trainer with ``__slots__`` keeps the actor's groups, and asks where the critic is published."""

from dataclasses import dataclass

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}
READER = "columns"
GIVEN = "columns"


@dataclass(slots=True)
class Trainer:
    pg_collection: megapg.ProcessGroupCollection

    def columns(self, width):
        return width // mpu.get_tensor_model_parallel_world_size()


def ask(trainer, shown):
    with megapg.published(shown):
        return trainer.columns(8)


def program(actor, critic):
    return ask(Trainer(actor), critic)
