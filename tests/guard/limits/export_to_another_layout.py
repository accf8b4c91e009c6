"""An export runs where the trainer is published, and is passed the groups that it exports to."""

from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2
REFUSED = True


def trained_columns(width):
    return width // mpu.get_tensor_model_parallel_world_size()


def export(width, rollout_groups):
    return trained_columns(width) * rollout_groups.size("tp")


def program():
    with two_sessions({"tp": 2}, {}) as (train, rollout), megapg.published(train):
        assert export(8, rollout) == 4
