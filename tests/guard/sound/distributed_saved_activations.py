"""Saved activations are split over tp=2 and gathered in the backward pass, inside ``published``."""

import torch
from layouts import session_then_globals
from megatron.core import tensor_parallel

import megapg

WORLD = 2


def program():
    with session_then_globals({"tp": 1}, tp=2) as pg, megapg.published(pg):
        weight = torch.ones((), requires_grad=True)
        batch = torch.arange(4.0, requires_grad=True)
        tensor_parallel.checkpoint(lambda given: given * weight, True, batch).sum().backward()
        assert weight.grad == 6
