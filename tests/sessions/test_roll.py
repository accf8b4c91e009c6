"""ROLL's own training strategy: two layouts in the same workers, by the lines of the guide.

ROLL is unchanged. It is in no package index, so ``make test-roll`` runs this on a checkout.
"""

import importlib.util
import re
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_globals import world
from tiny_qwen2 import WORDS, causal_attention, write_qwen2

import megapg
from megapg.megatron import parallel_state
from megapg.testing import megatron_on_cpu, run_distributed

pytestmark = [
    pytest.mark.roll,
    pytest.mark.skipif(not importlib.util.find_spec("roll"), reason="make test-roll needs ROLL"),
]

GUIDE = Path(__file__).parents[2] / "migration_guide" / "rl-framework.md"
STUDENT, TEACHER = ("student", 2, 1), ("teacher", 1, 2)  # name, tp, pp
LENGTH, STEPS = 12, 3


def worker(model, name, tp, pp):
    """Return what a strategy asks of its worker."""
    from roll.configs import ModelArguments
    from roll.configs.training_args import TrainingArguments
    from roll.configs.worker_config import StrategyArguments, WorkerConfig
    from roll.distributed.executor.worker import RankInfo

    parallel = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    local = {
        "transformer_impl": "local",
        "use_cpu": True,
        "overlap_p2p_comm": False,
        "additional_configs": {
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "apply_rope_fusion": False,
            "bias_activation_fusion": False,
            "gradient_accumulation_fusion": False,
        },
    }
    config = WorkerConfig(
        name=name,
        model_args=ModelArguments(model_name_or_path=str(model)),
        training_args=TrainingArguments(
            learning_rate=1e-2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=40,
            warmup_steps=0,
            lr_scheduler_type="constant",
        ),
        strategy_args=StrategyArguments(
            strategy_name="megatron_train",
            strategy_config={**parallel, **local, "use_distributed_optimizer": True},
        ),
    )
    return SimpleNamespace(
        worker_config=config,
        pipeline_config=SimpleNamespace(max_grad_norm=1.0, sequence_length=LENGTH),
        rank_info=RankInfo(world_size=4),
    )


def initialize(strategy, pg=None):
    """Seed Megatron's random streams, as ROLL does only if there is a GPU; build the model."""
    from roll.models.model_providers import default_actor_model_provider

    megapg.seed_all(42, pg)
    strategy.initialize(default_actor_model_provider)


def train(strategy):
    """Return the metrics of a step."""
    from roll.distributed.scheduler.protocol import DataProto

    draw = torch.Generator().manual_seed(7 + strategy.worker.rank_info.dp_rank)
    words = torch.randint(WORDS, (4, LENGTH), generator=draw)
    batch = DataProto.from_dict(
        {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.clone()}
    )
    batch.meta_info = {
        "loss_mask_keys": ["labels"],
        "is_offload_optimizer_states_in_train_step": False,
    }

    def loss_of(data, output):
        tokens = data.meta_info["batch_num_tokens"]["labels"]
        loss, metrics = strategy.op_compute_language_loss(output, data.batch["labels"], tokens)
        return loss * data.meta_info["loss_scale"], metrics

    return strategy.train_step(strategy.get_data_input(batch), loss_of)


def alone(model, name, tp, pp):
    """Train with ROLL's unchanged strategy, on the globals."""
    from roll.distributed.strategy.factory import create_strategy

    with world(name):
        parallel_state.initialize_model_parallel(tp, pp)  # as ROLL does, but before the seed
        strategy = create_strategy(worker(model, name, tp, pp))
        initialize(strategy)
        return [train(strategy) for _ in range(STEPS)]


def together(model, lines):
    from roll.distributed.strategy import megatron_strategy
    from roll.distributed.strategy.factory import create_strategy

    strategies = []
    plain = megatron_strategy.MegatronTrainStrategy
    with mock.patch.object(megatron_strategy, "MegatronTrainStrategy", plain):
        exec(lines, {})
        for kind in (STUDENT, TEACHER):
            strategy = create_strategy(worker(model, *kind))
            with strategy.turn as pg:
                initialize(strategy, pg)
            strategies.append(strategy)
    student, teacher = strategies
    steps = [[], []]
    with student.session, teacher.session:
        for _ in range(STEPS):
            for strategy, told in zip(strategies, steps, strict=True):
                told.append(train(strategy))
            megapg.suspend(student.session, teacher.session)
            megapg.resume(student.session, teacher.session)
            for strategy in strategies:
                assert strategy.session.rebind(strategy).complete
        assert dist.is_initialized()
    return steps


def both_ways(model, lines):
    import ray
    from megatron.core.models.backends import LocalSpecProvider
    from roll.distributed.scheduler.storage import SharedStorage
    from roll.utils.constants import RAY_NAMESPACE, STORAGE_NAME

    warnings.simplefilter("ignore")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    options = {"name": STORAGE_NAME, "namespace": RAY_NAMESPACE}
    storage = SharedStorage.options(**options).remote()  # ROLL's worker keeps it alive
    attention = causal_attention()
    local = mock.patch.object(LocalSpecProvider, "core_attention", return_value=attention)
    try:
        with local, megatron_on_cpu(), megapg.guard("error"):
            return together(model, lines), [alone(model, *STUDENT), alone(model, *TEACHER)]
    finally:
        del storage
        ray.shutdown()


@pytest.mark.timeout(600)
def test_two_strategies_of_different_layouts_train_as_each_does_alone(tmp_path, monkeypatch):
    page = GUIDE.read_text()
    lines = re.search(r"### ROLL\n.*?```python\n(.*?)```", page, re.S)[1]
    assert len([line for line in lines.splitlines() if line]) <= 10
    monkeypatch.chdir(tmp_path)  # ROLL writes its logs there
    model = write_qwen2(tmp_path / "model")
    for two, single in run_distributed(partial(both_ways, model, lines), 4, deadline=500):
        assert two == single
        assert all("grad_norm" in str(step) for steps in two for step in steps)
