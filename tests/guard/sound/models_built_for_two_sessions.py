"""Models and optimizers are built on the groups of two sessions, with globals that hold nothing."""

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from models import gpt

LAYOUTS = {"first": {"tp": 2}, "second": {"ep": 2}}


def build(pg):
    model = gpt(pg, experts=2, add_bias_linear=False, sequence_parallel=pg.size("tp") > 1)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(model.config, settings, model, pg_collection=pg)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=0.1, use_distributed_optimizer=True),
        [model],
        use_gloo_process_groups=False,
        pg_collection=pg,
    )
    return len(getattr(optimizer, "chained_optimizers", [optimizer]))


def program(actor, critic):
    assert build(actor) > 0
    assert build(critic) > 0
