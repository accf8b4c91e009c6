"""A private global was imported by its name before, so it is a plain variable of the module."""

import torch
import torch.distributed as dist

import megapg
from megapg.megatron import parallel_state

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def total(value, pg_collection, group):
    dist.all_reduce(value, group=group)
    return value.item() / pg_collection.size("tp")


def program(pg):
    with megapg.allow_global_reads():  # stands for an import before the session
        group = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
    return total(torch.ones(()), pg, group)


def meant(pg):
    return total(torch.ones(()), pg, pg.tp)
