"""A step fails inside ``published``, and the next read outside belongs to the layout before."""

import pytest
from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2


def size():
    return mpu.get_tensor_model_parallel_world_size()


def failing_step(pg):
    with megapg.published(pg):
        raise OverflowError(size())


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic), megapg.published(critic):
        with pytest.raises(OverflowError, match="2"):
            failing_step(actor)
        assert size() == 1
