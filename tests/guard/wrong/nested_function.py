"""A forward step asks the globals inside a function that was made where the collection is known."""

from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "scale"
GIVEN = "step"


def make_step(pg_collection):
    def step(loss):
        def scale(value):
            return value / mpu.get_data_parallel_world_size()

        return scale(loss) * pg_collection.size("tp")

    return step


def program(pg):
    return make_step(pg)(8.0)
