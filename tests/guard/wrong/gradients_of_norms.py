"""The gradients of layer norms are not summed: the callback of the user's loop got no groups."""

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from models import config

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "finalize_model_grads"


class Norm(torch.nn.Module):
    def __init__(self, transformer_config):
        super().__init__()
        self.config = transformer_config
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.weight.sequence_parallel = True
        self.share_embeddings_and_output_weights = self.pre_process = self.post_process = False


def program(pg):
    made = config(pg, sequence_parallel=True)
    made.finalize_model_grads_func = finalize_model_grads
    model = DistributedDataParallel(
        made, DistributedDataParallelConfig(), Norm(made), pg_collection=pg
    )
    model.zero_grad_buffer()
    (model.module.weight * (1 + pg.rank("tp"))).sum().backward()
    made.finalize_model_grads_func([model])
    return model.module.weight.main_grad.tolist()
