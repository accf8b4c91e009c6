"""A helper gets the actor's model chunks in a list, and asks where the critic is published."""

from megatron.core import mpu
from models import gpt

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}
READER = "parameters_of"
GIVEN = "parameters_of"


def parameters_of(model):
    count = sum(parameter.numel() for chunk in model for parameter in chunk.parameters())
    return count * mpu.get_tensor_model_parallel_world_size()


def ask(pg, shown):
    chunks = [gpt(pg)]
    with megapg.published(shown):
        return parameters_of(chunks)


def program(actor, critic):
    return ask(actor, critic)
