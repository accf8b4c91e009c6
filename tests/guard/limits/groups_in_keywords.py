"""A wrapper passes ``**kwargs`` on, with the actor's groups, and asks where the critic is shown."""

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def build(width, pg_collection):
    return width // pg_collection.size("tp")


def timed(function, **kwargs):
    return [function(**kwargs), mpu.get_tensor_model_parallel_world_size()]


def ask(pg, shown):
    with megapg.published(shown):
        return timed(build, width=8, pg_collection=pg)


def program(actor, critic):
    return ask(actor, critic)
