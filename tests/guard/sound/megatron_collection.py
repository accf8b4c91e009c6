"""Code carries Megatron-core's own collection of the session's groups, inside ``published``."""

from megatron.core import mpu
from megatron.core.process_groups_config import ProcessGroupCollection

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def columns(width, pg_collection):
    assert isinstance(pg_collection, ProcessGroupCollection)
    return width // mpu.get_tensor_model_parallel_world_size()


def program(pg):
    with megapg.published(pg):
        assert columns(8, megapg.to_megatron(pg)) == 4
        assert columns(8, ProcessGroupCollection.use_mpu_process_groups()) == 4
