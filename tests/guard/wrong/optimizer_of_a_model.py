"""An optimizer that is built without the collection sums its norm over the globals' model ranks."""

from layouts import session_and_globals
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from models import gpt

WORLD = 2
READER = "setup_process_groups_for_optimizer"
GIVEN = "norm_of_gradients"


def norm_of_gradients(pg, **collection):
    model = gpt(pg)
    model = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(), model, pg_collection=pg
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1), [model], use_gloo_process_groups=False, **collection
    )
    for parameter in model.parameters():
        parameter.main_grad.fill_(1)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return norm_of_gradients(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return norm_of_gradients(pg, pg_collection=pg)
