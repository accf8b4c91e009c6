"""DDP without the collection averages the gradients of two tensor parallel shards."""

import torch
from layouts import session_and_globals
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import config

WORLD = 2
READER = "setup_process_groups_for_ddp"
GIVEN = "gradients"


class Shard(torch.nn.Module):
    def __init__(self, transformer_config):
        super().__init__()
        self.config = transformer_config
        self.weight = torch.nn.Parameter(torch.ones(3))


def gradients(pg, **collection):
    small = config(pg)
    model = DistributedDataParallel(
        small, DistributedDataParallelConfig(), Shard(small), **collection
    )
    model.zero_grad_buffer()
    (model.module.weight.sum() * (1 + pg.rank("tp"))).backward()
    model.finish_grad_sync()
    return model.module.weight.main_grad.tolist()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return gradients(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return gradients(pg, pg_collection=pg)
