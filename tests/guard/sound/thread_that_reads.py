"""A thread without a collection reads the globals while the main thread publishes one."""

from concurrent.futures import ThreadPoolExecutor

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, _), megapg.published(actor):
        with ThreadPoolExecutor(1) as pool:
            size = pool.submit(mpu.get_tensor_model_parallel_world_size).result()
        assert size == 2
