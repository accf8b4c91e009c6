"""A loop calls a function that leaves its block open, so the next call is at the same place."""

from contextlib import ExitStack

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def phase(blocks, pg_collection, show):
    if show:
        blocks.enter_context(megapg.published(pg_collection))
    return mpu.get_tensor_model_parallel_world_size()


def run(both, second):
    actor, critic = both
    with ExitStack() as blocks:
        turns = [(critic, True), (actor, second)]
        return [phase(blocks, pg, show) for pg, show in turns]


def program(*both):
    return run(both, second=False)


def meant(*both):
    return run(both, second=True)
