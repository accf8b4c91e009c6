"""A backward pass runs in a thread, as on a GPU: its stack begins there, with nothing given."""

import threading

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {}}


def gradient_scale(sizes):
    sizes.append(1 / mpu.get_tensor_model_parallel_world_size())


def backward(pg_collection, shown):
    sizes = [pg_collection.size("pp")]
    with megapg.published(shown):
        thread = threading.Thread(target=gradient_scale, args=(sizes,))
        thread.start()
        thread.join()
    return sizes


def program(actor, critic):
    return backward(actor, critic)
