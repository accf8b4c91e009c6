"""A training step with explicit groups and a loss of the user's, outside of any block."""

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from models import LENGTH, gpt, tokens

import megapg
from megapg.megatron import schedule_collection

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def forward_step(pg, data, model):
    logits = gather_from_tensor_model_parallel_region(model(next(data), tokens(), None), pg.tp)
    return logits, lambda output: (output.square().mean(), output.square().mean().item())


def step(pg, shown):
    torch.manual_seed(3)
    megapg.seed_all(3, pg)
    model = gpt(pg)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(model.config, settings, model, pg_collection=pg)
    model.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, use_distributed_optimizer=True),
        [model],
        use_gloo_process_groups=False,
        pg_collection=pg,
    )
    losses = []
    for _ in range(2):
        model.zero_grad_buffer()
        losses += get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=lambda data, model: forward_step(pg, data, model),
            data_iterator=iter([tokens()]),
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=1,
            pg_collection=schedule_collection(pg),
        )
        losses.append(float(optimizer.step()[1]))
    return losses


def program(pg):
    alone = step(pg, shown=False)
    with megapg.published(pg):
        assert step(pg, shown=True) == alone
