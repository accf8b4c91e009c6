"""A loader cuts expert weights by the globals' expt_tp=2, and the model's experts are whole."""

import torch
from megatron.core import parallel_state as ps

WORLD = 4
LAYOUTS = {"globals": {"tp": 2}, "mine": {"tp": 2, "ep": 2, "expt_tp": 1}}
READER = "expert_part"
GIVEN = "load_expert"


def expert_part(weight):
    size = ps.get_expert_tensor_parallel_world_size()
    return weight.chunk(size)[ps.get_expert_tensor_parallel_rank()]


def load_expert(weight, groups):
    return expert_part(weight).tolist() + [0] * (groups.size("expt_tp") - 1)


def program(pg):
    return load_expert(torch.arange(4), pg)
