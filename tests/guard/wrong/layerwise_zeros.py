"""The layer-wise optimizer counts zeros by the globals' tp rank (NVIDIA/Megatron-LM #6099)."""

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "param_is_not_tensor_parallel_duplicate"
GIVEN = "count_zeros"


def program(pg):
    bias = torch.nn.Parameter(torch.ones(4))
    bias.grad = torch.tensor([0.0, 0.0, 1.0, 1.0])
    settings = OptimizerConfig(lr=0.1)
    inner = FP32Optimizer(torch.optim.SGD([bias], lr=0.1), settings, None)
    optimizer = LayerWiseDistributedOptimizer([inner], settings, pg_collection=pg)
    return float(optimizer.count_zeros())
