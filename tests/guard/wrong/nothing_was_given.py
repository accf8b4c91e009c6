"""A script keeps its collection in a module variable, and its batch function asks the globals."""

from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "my_rows"
GIVEN = ""


def my_rows(rows):
    return rows[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def program(*_):
    return my_rows([0, 1, 2, 3])
