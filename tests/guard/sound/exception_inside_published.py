"""A step fails inside ``published``, and the next read outside belongs to the layout before."""

import pytest
from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def size():
    return mpu.get_tensor_model_parallel_world_size()


def failing_step(pg):
    with megapg.published(pg):
        raise OverflowError(size())


def program(actor, critic):
    with megapg.published(critic):
        with pytest.raises(OverflowError, match="2"):
            failing_step(actor)
        assert size() == 1
