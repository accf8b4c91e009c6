"""A backward pass adds no gradients up: ``copy_to_tensor_model_parallel_region`` got no group."""

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

LAYOUTS = {"mine": {"tp": 2}, "globals": {"tp": 1}}
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "input_gradient"


def input_gradient(weight, tp_group):
    hidden = torch.ones(3, requires_grad=True)
    total = tp_group.size() * copy_to_tensor_model_parallel_region(hidden) @ weight
    total.backward()
    return hidden.grad.tolist()


def program(pg):
    return input_gradient(torch.full((3,), 1.0 + pg.rank("tp")), pg.tp)
