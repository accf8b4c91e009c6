"""``broadcast_data`` is given a group, and takes the sizes of a batch from the globals' ranks."""

import torch
from megatron.core.tensor_parallel import broadcast_data

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "broadcast_data"


def next_batch(length, tp_group):
    data = {"tokens": torch.arange(length)}
    return broadcast_data(["tokens"], data, torch.int64, tp_group=tp_group)["tokens"].tolist()


def program(pg):
    return next_batch(3 + pg.rank("dp"), pg.tp)
