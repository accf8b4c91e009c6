"""Saved activations are split over tp=2 and gathered in the backward pass, inside ``published``."""

import torch
from megatron.core import tensor_parallel

import megapg

LAYOUTS = {"mine": {"tp": 2}, "globals": {"tp": 1}}


def program(pg):
    with megapg.published(pg):
        weight = torch.ones((), requires_grad=True)
        batch = torch.arange(4.0, requires_grad=True)
        tensor_parallel.checkpoint(lambda given: given * weight, True, batch).sum().backward()
        assert weight.grad == 6
