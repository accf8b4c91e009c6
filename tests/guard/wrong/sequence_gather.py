"""A head gathers the sequence over the globals: ``group=None`` is the default of the mapping."""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "get_tensor_model_parallel_group_if_none"


def program(pg):
    hidden = torch.full((3, 1, 2), 1.0 + pg.rank("tp"))
    return gather_from_sequence_parallel_region(hidden).sum().item()
