"""A generator publishes the critic and is resumed from several lines of the actor's trainer."""

from layouts import open_session
from megatron.core import mpu

import megapg


def size():
    return mpu.get_tensor_model_parallel_world_size()


class Trainer:
    def __init__(self, actor, critic):
        self.pg, self.critic = actor.groups, critic

    def values(self):
        with megapg.published(self.critic.groups):
            while True:
                yield size()


def program():
    with open_session("actor", tp=2) as actor, open_session("critic") as critic:
        values = Trainer(actor, critic).values()
        first = next(values)
        second = next(values)
        values.close()
        assert (first, second) == (1, 1)
