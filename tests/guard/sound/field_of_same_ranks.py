"""Two layouts differ in their experts only; a read of tp needs no block."""

from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"ep": 2}}


def columns(pg_collection, width):
    assert pg_collection.size("ep") == 2
    return width // mpu.get_tensor_model_parallel_world_size()


def program(pg):
    assert columns(pg, 8) == 8
