"""A project wraps ``published`` in its own context manager and in its own decorator."""

import functools
from contextlib import ExitStack, contextmanager

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


@contextmanager
def using(pg):
    with megapg.published(pg):
        yield


def inside(pg):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            with using(pg):
                return function(*args)

        return wrapper

    return decorate


def size():
    return mpu.get_tensor_model_parallel_world_size()


def program(actor, critic):
    with using(critic):
        assert size() == 1
    assert inside(actor)(size)() == 2
    with ExitStack() as stack:
        stack.enter_context(using(actor))
        assert size() == 2
