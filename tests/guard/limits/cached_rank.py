"""A rank is cached while the critic is published, and used for the actor: nothing is read then."""

import functools

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


@functools.cache
def tensor_size():
    return mpu.get_tensor_model_parallel_world_size()


def columns(width, pg_collection):
    with megapg.published(pg_collection):
        return width // tensor_size()


def program(actor, critic):
    tensor_size.cache_clear()
    return [columns(8, critic), columns(8, actor)]


def meant(actor, critic):
    return [8 // critic.size("tp"), 8 // actor.size("tp")]
