"""DDP without the collection averages the gradients of two tensor parallel shards."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import config

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "setup_process_groups_for_ddp"


class Shard(torch.nn.Module):
    def __init__(self, transformer_config):
        super().__init__()
        self.config = transformer_config
        self.weight = torch.nn.Parameter(torch.ones(3))


def program(pg):
    small = config(pg)
    model = DistributedDataParallel(small, DistributedDataParallelConfig(), Shard(small))
    model.zero_grad_buffer()
    (model.module.weight.sum() * (1 + pg.rank("tp"))).backward()
    model.finish_grad_sync()
    return model.module.weight.main_grad.tolist()
