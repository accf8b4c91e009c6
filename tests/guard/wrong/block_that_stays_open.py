"""A phase publishes the critic and leaves its block open; the same function then runs the actor."""

from contextlib import ExitStack

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}
READER = "phase"
GIVEN = "phase"


def phase(blocks, pg_collection, show):
    if show:
        blocks.enter_context(megapg.published(pg_collection))
    return mpu.get_tensor_model_parallel_world_size()


def program(*both):
    with ExitStack() as blocks:
        actor, critic = both
        return [phase(blocks, critic, True), phase(blocks, actor, False)]


def meant(*both):
    with ExitStack() as blocks:
        actor, critic = both
        return [phase(blocks, critic, True), phase(blocks, actor, True)]
