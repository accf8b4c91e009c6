"""An optimizer without ``tp_group`` filters duplicates by the globals (Megatron-LM #6099)."""

import torch
from layouts import session_and_globals
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer

WORLD = 2
READER = "param_is_not_tensor_parallel_duplicate"
GIVEN = "norm_of_a_step"


def norm_of_a_step(pg, **groups):
    bias = torch.nn.Parameter(torch.ones(4))
    optimizer = FP32Optimizer(torch.optim.SGD([bias], lr=0.1), OptimizerConfig(lr=0.1), None)
    optimizer.grad_stats_parallel_group = pg.mp
    for name, group in groups.items():
        setattr(optimizer, name, group)
    bias.main_grad = torch.ones(4)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return norm_of_a_step(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return norm_of_a_step(pg, tp_group=pg.tp)
