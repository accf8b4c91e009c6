"""Recomputation splits its saved input over the globals' tp=2: data parallel ranks mix batches."""

import torch
from megatron.core import tensor_parallel

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "weight_gradient"


def weight_gradient(batch, pg_collection):
    assert pg_collection.size("tp") == 1
    weight = torch.ones((), requires_grad=True)
    batch = batch.requires_grad_()
    tensor_parallel.checkpoint(lambda given: given * weight, True, batch).sum().backward()
    return weight.grad.item()


def program(pg):
    return weight_gradient(torch.full((4,), 1.0 + pg.rank("dp")), pg)
