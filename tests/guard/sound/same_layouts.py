"""Two sessions have the same ranks for every field, so any read answers for both."""

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2
AMBIGUOUS = False


def ranks(pg_collection):
    return mpu.get_tensor_model_parallel_world_size() == pg_collection.size("tp")


def program():
    with two_sessions({"tp": 2}, {"tp": 2}) as (actor, critic), megapg.published(critic):
        assert ranks(actor)
