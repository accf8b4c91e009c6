"""A reward is computed for the critic in a block inside the actor's block."""

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def size():
    return mpu.get_tensor_model_parallel_world_size()


def reward(critic_groups):
    with megapg.published(critic_groups):
        return size()


def rollout(actor_groups, critic_groups):
    with megapg.published(actor_groups):
        return [size(), reward(critic_groups), size()]


def program(actor, critic):
    assert rollout(actor, critic) == [2, 1, 2]
    assert rollout(critic, actor) == [1, 2, 1]
