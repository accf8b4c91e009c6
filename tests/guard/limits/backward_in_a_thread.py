"""A backward pass runs in a thread, as on a GPU: its stack begins there, with nothing given."""

import threading

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2


def gradient_scale(sizes):
    sizes.append(1 / mpu.get_tensor_model_parallel_world_size())


def backward(pg_collection, shown):
    sizes = [pg_collection.size("pp")]
    with megapg.published(shown):
        thread = threading.Thread(target=gradient_scale, args=(sizes,))
        thread.start()
        thread.join()
    return sizes


def program():
    with two_sessions({"tp": 2}, {}) as (actor, critic):
        return backward(actor, critic)


def meant():
    with two_sessions({"tp": 2}, {}) as (actor, _):
        return backward(actor, actor)
