"""A compiled function asks the globals inside ``published``, while another layout is alive."""

import torch
from layouts import opened
from megatron.core import mpu

import megapg

WITHOUT_KIT = True


def scaled(values, pg_collection):
    assert pg_collection is not None
    return values * mpu.get_tensor_model_parallel_world_size()


def program():
    compiled = torch.compile(scaled, backend="eager")
    with opened(globals={"tp": 1}, mine={"tp": 2}) as (pg,), megapg.published(pg):
        assert compiled(torch.ones(2), pg).tolist() == [2, 2]
    torch.compiler.reset()
