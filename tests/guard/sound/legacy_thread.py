"""A legacy model is allowed to read the globals, and hands a part of its work to a thread."""

from concurrent.futures import ThreadPoolExecutor

from layouts import opened
from megatron.core import mpu

import megapg


def program():
    with opened(globals={"tp": 1}, mine={"tp": 2}), megapg.allow_global_reads():
        with ThreadPoolExecutor(1) as pool:
            size = pool.submit(mpu.get_tensor_model_parallel_world_size).result()
        assert size == 1
