"""A helper gets the actor's model chunks in a list, and asks where the critic is published."""

from layouts import two_sessions
from megatron.core import mpu
from models import gpt

import megapg

WORLD = 2
READER = "parameters_of"
GIVEN = "parameters_of"


def parameters_of(model):
    count = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
    return count * mpu.get_tensor_model_parallel_world_size()


def ask(pg, shown):
    chunks = [gpt(pg)]
    with megapg.published(shown):
        return parameters_of(chunks)


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return ask(actor, critic)


def meant():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, _):
        return ask(actor, actor)
