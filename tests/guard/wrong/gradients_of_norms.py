"""The gradients of layer norms are not summed: the callback of the user's loop got no groups."""

import torch
from layouts import session_and_globals
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from models import config

WORLD = 2
READER = "finalize_model_grads"
GIVEN = "train_step"


class Norm(torch.nn.Module):
    def __init__(self, transformer_config):
        super().__init__()
        self.config = transformer_config
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.weight.sequence_parallel = True
        self.share_embeddings_and_output_weights = self.pre_process = self.post_process = False


def train_step(pg, **collection):
    made = config(pg, sequence_parallel=True)
    made.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(
        made, DistributedDataParallelConfig(), Norm(made), pg_collection=pg
    )
    model.zero_grad_buffer()
    (model.module.weight * (1 + pg.rank("tp"))).sum().backward()
    made.finalize_model_grads_func([model], **collection)
    return model.module.weight.main_grad.tolist()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return train_step(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return train_step(pg, pg_collection=pg)
