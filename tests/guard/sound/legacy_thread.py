"""A legacy model is allowed to read the globals, and hands a part of its work to a thread."""

from concurrent.futures import ThreadPoolExecutor

from megatron.core import mpu

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def program(*_):
    with megapg.allow_global_reads(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(mpu.get_tensor_model_parallel_world_size).result() == 1
