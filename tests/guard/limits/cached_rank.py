"""A rank is cached while the critic is published, and used for the actor: nothing is read then."""

import functools

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2


@functools.cache
def tensor_size():
    return mpu.get_tensor_model_parallel_world_size()


def columns(width, pg_collection):
    with megapg.published(pg_collection):
        return width // tensor_size()


def program():
    tensor_size.cache_clear()
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return [columns(8, critic), columns(8, actor)]


def meant():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return [8 // critic.size("tp"), 8 // actor.size("tp")]
