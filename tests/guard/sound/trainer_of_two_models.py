"""A trainer keeps both collections in one object, and its helpers read inside ``published``."""

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


class Trainer:
    def __init__(self, actor_pg, critic_pg):
        self.actor_pg, self.critic_pg = actor_pg, critic_pg

    def sizes(self):
        with megapg.published(self.critic_pg):
            return self._size(), plain_size()

    def _size(self):
        return mpu.get_tensor_model_parallel_world_size()


def plain_size():
    return mpu.get_tensor_model_parallel_world_size()


def program(actor, critic):
    assert Trainer(actor, critic).sizes() == (1, 1)
    assert Trainer(critic, actor).sizes() == (2, 2)
