"""A script keeps its collection in a module variable, and its batch function asks the globals."""

from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 2
READER = "my_rows"
GIVEN = ""


def my_rows(rows):
    return rows[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def batch():
    return my_rows([0, 1, 2, 3])


def program():
    with session_and_globals({"tp": 1}, tp=2):
        return batch()


def shown(pg):
    with megapg.published(pg):
        return batch()


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return shown(pg)
