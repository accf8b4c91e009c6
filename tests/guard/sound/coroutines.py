"""Two coroutines take turns on the event loop, each with blocks that end before it waits."""

import asyncio

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def size():
    return mpu.get_tensor_model_parallel_world_size()


async def worker(pg, sizes):
    for _ in range(3):
        with megapg.published(pg):
            sizes.append(size())
        await asyncio.sleep(0)


async def both(actor, critic):
    sizes = [], []
    await asyncio.gather(worker(actor, sizes[0]), worker(critic, sizes[1]))
    return sizes


def program(actor, critic):
    assert asyncio.run(both(actor, critic)) == ([2] * 3, [1] * 3)
