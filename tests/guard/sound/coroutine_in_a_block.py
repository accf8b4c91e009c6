"""A coroutine publishes the critic and waits inside the block, in an object that has the actor."""

import asyncio

from layouts import open_session
from megatron.core import mpu

import megapg


async def size():
    await asyncio.sleep(0)
    return mpu.get_tensor_model_parallel_world_size()


class Rollout:
    def __init__(self, actor, critic):
        self.pg, self.critic = actor.groups, critic

    async def values(self):
        with megapg.published(self.critic.groups):
            first = await size()
            await asyncio.sleep(0.01)
            return first, await size()


def program():
    with open_session("actor", tp=2) as actor, open_session("critic") as critic:
        assert asyncio.run(Rollout(actor, critic).values()) == (1, 1)
