"""An optimizer without ``tp_group`` filters duplicates by the globals (Megatron-LM #6099)."""

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "param_is_not_tensor_parallel_duplicate"


def program(pg):
    bias = torch.nn.Parameter(torch.ones(4))
    optimizer = FP32Optimizer(torch.optim.SGD([bias], lr=0.1), OptimizerConfig(lr=0.1), None)
    optimizer.grad_stats_parallel_group = pg.mp
    bias.main_grad = torch.ones(4)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())
