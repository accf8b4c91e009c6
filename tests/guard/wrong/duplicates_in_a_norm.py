"""A trainer's gradient norm counts a replicated bias once a rank (NVIDIA/Megatron-LM #5916)."""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "param_is_not_tensor_parallel_duplicate"
GIVEN = "gradient_norm"


def gradient_norm(parameters, pg_collection):
    counted = [p for p in parameters if param_is_not_tensor_parallel_duplicate(p)]
    total = sum((p.grad.square().sum() for p in counted), torch.zeros(()))
    dist.all_reduce(total, group=pg_collection.mp)
    return total.sqrt().item()


def replicated_bias():
    bias = torch.nn.Parameter(torch.ones(4))
    bias.grad = torch.ones(4)
    return [bias]


def program(pg):
    return gradient_norm(replicated_bias(), pg)
