"""Code asks whether anything is initialised, for the memory buffer and for virtual stages."""

from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def ask(pg_collection):
    assert mpu.is_initialized()
    assert mpu.model_parallel_is_initialized()
    mpu.get_global_memory_buffer()
    return mpu.get_virtual_pipeline_model_parallel_rank(), pg_collection.size("tp")


def program(pg):
    assert ask(pg) == (None, 2)
