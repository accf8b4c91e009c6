"""A helper gets the actor's wrapped model, and asks where the critic is published."""

from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import gpt

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}
READER = "columns_of"
GIVEN = "columns_of"


def columns_of(policy, width):
    return [policy.ddp_config is None, width // mpu.get_tensor_model_parallel_world_size()]


def ask(pg, shown):
    model = gpt(pg)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(), model, pg_collection=pg
    )
    with megapg.published(shown):
        return columns_of(wrapped, 8)


def program(actor, critic):
    return ask(actor, critic)
