"""A trainer with ``__slots__`` keeps the actor's groups, and asks where the critic is published."""

from dataclasses import dataclass

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2
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


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return ask(Trainer(actor), critic)


def meant():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, _):
        return ask(Trainer(actor), actor)
