"""The student is published while the teacher's logits are split: two sessions were swapped."""

import torch
from layouts import two_sessions
from megatron.core import mpu

import megapg

WORLD = 2
READER = "my_columns"
GIVEN = "distill"


def my_columns(logits):
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    return logits.chunk(size)[rank]


def distill(logits, model_groups):
    return my_columns(logits).tolist() * model_groups.size("dp")


def program():
    with two_sessions({"tp": 2}, {}) as (teacher, student), megapg.published(student):
        return distill(torch.arange(4), teacher)


def meant():
    with two_sessions({"tp": 2}, {}) as (teacher, _), megapg.published(teacher):
        return distill(torch.arange(4), teacher)
