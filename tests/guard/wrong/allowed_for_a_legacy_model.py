"""A block allows reads for a legacy model, and a function inside was given the session's groups."""

from megatron.core import mpu

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "columns"
GIVEN = "policy_columns"


def columns(width):
    return width // mpu.get_tensor_model_parallel_world_size()


def policy_columns(width, pg_collection):
    assert pg_collection.size("tp") == 2
    return columns(width)


def program(pg):
    with megapg.allow_global_reads():
        return [columns(8), policy_columns(8, pg)]


def meant(pg):
    with megapg.allow_global_reads():
        return [columns(8), 8 // pg.size("tp")]
