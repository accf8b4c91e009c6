"""A class keeps the actor's groups, and its class method asks where the critic is published."""

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2
READER = "columns"
GIVEN = "columns"


class Actor:
    pg_collection = None

    @classmethod
    def columns(cls, width):
        return width // mpu.get_tensor_model_parallel_world_size()


def ask(shown):
    with megapg.published(shown):
        return Actor.columns(8)


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        Actor.pg_collection = actor
        return ask(critic)


def meant():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, _):
        Actor.pg_collection = actor
        return ask(actor)
