"""A function gets the actor's model, and asks the globals where the critic is published."""

from megatron.core import mpu
from models import gpt

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}
READER = "padded_vocabulary"
GIVEN = "padded_vocabulary"


def padded_vocabulary(model, words):
    each = mpu.get_tensor_model_parallel_world_size() * 4
    return -(-words // each) * each + 0 * len(list(model.children()))


def ask(actor, shown):
    model = gpt(actor)
    with megapg.published(shown):
        return padded_vocabulary(model, 33)


def program(actor, critic):
    return ask(actor, critic)
