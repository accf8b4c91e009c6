"""A head gathers the sequence over the globals: ``group=None`` is the default of the mapping."""

import torch
from layouts import session_and_globals
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

WORLD = 2
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "pooled"


def pooled(hidden, pg, group=None):
    return gather_from_sequence_parallel_region(hidden, group=group).sum().item()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return pooled(torch.full((3, 1, 2), 1.0 + pg.rank("tp")), pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return pooled(torch.full((3, 1, 2), 1.0 + pg.rank("tp")), pg, pg.tp)
