"""A block allows reads for a legacy model, and a function inside was given the session's groups."""

from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 2
READER = "columns"
GIVEN = "policy_columns"


def columns(width):
    return width // mpu.get_tensor_model_parallel_world_size()


def policy_columns(width, pg_collection):
    assert pg_collection.size("tp") == 2
    return columns(width)


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.allow_global_reads():
        return [columns(8), policy_columns(8, pg)]


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.allow_global_reads():
        return [columns(8), 8 // pg.size("tp")]
