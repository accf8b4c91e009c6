"""A thread without a collection reads the globals while the main thread publishes one."""

from concurrent.futures import ThreadPoolExecutor

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def program(actor, _):
    with megapg.published(actor):
        with ThreadPoolExecutor(1) as pool:
            size = pool.submit(mpu.get_tensor_model_parallel_world_size).result()
        assert size == 2
