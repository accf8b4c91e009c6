"""Two layouts differ in their experts only; a read of tp needs no block."""

from layouts import session_and_globals
from megatron.core import mpu

WORLD = 2


def columns(pg_collection, width):
    assert pg_collection.size("ep") == 2
    return width // mpu.get_tensor_model_parallel_world_size()


def program():
    with session_and_globals({"tp": 1}, ep=2) as pg:
        assert columns(pg, 8) == 8
