"""A wrapper passes ``**kwargs`` on, with the actor's groups, and asks where the critic is shown."""

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2


def build(width, pg_collection):
    return width // pg_collection.size("tp")


def timed(function, **kwargs):
    return [function(**kwargs), mpu.get_tensor_model_parallel_world_size()]


def ask(pg, shown):
    with megapg.published(shown):
        return timed(build, width=8, pg_collection=pg)


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return ask(actor, critic)


def meant():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, _):
        return ask(actor, actor)
