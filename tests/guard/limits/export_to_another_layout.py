"""An export runs where the trainer is published, and is passed the groups that it exports to."""

from megatron.core import mpu

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {}}
REFUSED = True


def trained_columns(width):
    return width // mpu.get_tensor_model_parallel_world_size()


def export(width, rollout_groups):
    return trained_columns(width) * rollout_groups.size("tp")


def program(train, rollout):
    with megapg.published(train):
        assert export(8, rollout) == 4
