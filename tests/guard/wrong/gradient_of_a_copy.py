"""A backward pass adds no gradients up: ``copy_to_tensor_model_parallel_region`` got no group."""

import torch
from layouts import session_then_globals
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

WORLD = 2
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "input_gradient"


def input_gradient(weight, tp_group, **group):
    hidden = torch.ones(3, requires_grad=True)
    total = tp_group.size() * copy_to_tensor_model_parallel_region(hidden, **group) @ weight
    total.backward()
    return hidden.grad.tolist()


def program():
    with session_then_globals({"tp": 1}, tp=2) as pg:
        return input_gradient(torch.full((3,), 1.0 + pg.rank("tp")), pg.tp)


def meant():
    with session_then_globals({"tp": 1}, tp=2) as pg:
        return input_gradient(torch.full((3,), 1.0 + pg.rank("tp")), pg.tp, group=pg.tp)
