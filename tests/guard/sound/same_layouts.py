"""Two sessions have the same ranks for every field, so any read answers for both."""

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"tp": 2}}
AMBIGUOUS = False


def ranks(pg_collection):
    return mpu.get_tensor_model_parallel_world_size() == pg_collection.size("tp")


def program(actor, critic):
    with megapg.published(critic):
        assert ranks(actor)
