"""The batch is cut along the sequence for the globals' cp=2, and the model has cp=1."""

import torch
from megatron.core.utils import get_batch_on_this_cp_rank

LAYOUTS = {"globals": {"cp": 2}, "mine": {}}
READER = "get_batch_on_this_cp_rank"
CORES = ("0.16", "0.17")


def program(pg_collection):
    assert pg_collection.size("cp") == 1
    batch = {"tokens": torch.arange(8).view(1, 8)}
    return get_batch_on_this_cp_rank(batch)["tokens"].tolist()
