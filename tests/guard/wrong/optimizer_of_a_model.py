"""An optimizer that is built without the collection sums its norm over the globals' model ranks."""

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from models import gpt

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "setup_process_groups_for_optimizer"


def program(pg):
    model = gpt(pg)
    model = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(), model, pg_collection=pg
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1), [model], use_gloo_process_groups=False
    )
    for parameter in model.parameters():
        parameter.main_grad.fill_(1)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())
