"""The batch is cut along the sequence for the globals' cp=2, and the model has cp=1."""

import torch
from layouts import session_and_globals
from megatron.core.utils import get_batch_on_this_cp_rank

WORLD = 2
READER = "get_batch_on_this_cp_rank"
GIVEN = "get_batch"
CORES = ("0.16", "0.17")


def get_batch(pg_collection, **group):
    assert pg_collection.size("cp") == 1
    batch = {"tokens": torch.arange(8).view(1, 8)}
    return get_batch_on_this_cp_rank(batch, **group)["tokens"].tolist()


def program():
    with session_and_globals({"cp": 2}) as pg:
        return get_batch(pg)


def meant():
    with session_and_globals({"cp": 2}) as pg:
        return get_batch(pg, cp_group=pg.cp)
