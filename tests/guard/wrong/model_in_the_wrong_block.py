"""A function gets the actor's model, and asks the globals where the critic is published."""

from layouts import two_sessions
from megatron.core import mpu
from models import gpt

import megapg

WORLD = 2
READER = "padded_vocabulary"
GIVEN = "padded_vocabulary"


def padded_vocabulary(model, words):
    each = mpu.get_tensor_model_parallel_world_size() * 4
    return -(-words // each) * each + 0 * len(list(model.children()))


def ask(actor, shown):
    model = gpt(actor)
    with megapg.published(shown):
        return padded_vocabulary(model, 33)


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return ask(actor, critic)


def meant():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, _):
        return ask(actor, actor)
