"""A forward step asks the globals inside a function that was made where the collection is known."""

from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 2
READER = "scale"
GIVEN = "step"


def make_step(pg_collection):
    def step(loss):
        def scale(value):
            return value / mpu.get_data_parallel_world_size()

        return scale(loss) * pg_collection.size("tp")

    return step


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return make_step(pg)(8.0)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.published(pg):
        return make_step(pg)(8.0)
