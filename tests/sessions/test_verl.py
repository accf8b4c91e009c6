"""verl's own engines: two layouts in the same workers, by the lines that the guide shows.

verl is unchanged. Its layers are Transformer Engine's, which needs CUDA, so mbridge builds the
model of Megatron-core's own layers here.
"""

import importlib.util
import re
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from on_globals import world
from tiny_qwen2 import WORDS, causal_attention, write_qwen2

import megapg
from megapg.testing import megatron_on_cpu, run_distributed

pytestmark = [
    pytest.mark.verl,
    pytest.mark.skipif(not importlib.util.find_spec("verl"), reason="make test-verl installs verl"),
]

GUIDE = Path(__file__).parents[2] / "migration_guide" / "rl-framework.md"
ACTOR, CRITIC = ("language_model", 2, 1), ("value_model", 1, 2)  # kind, tp, pp
STEPS = 3


@pytest.fixture
def model(tmp_path):
    return write_qwen2(tmp_path)


def build_of_local_layers():
    """Have mbridge build Qwen2 of Megatron-core's own layers."""
    from mbridge.core import register_model
    from mbridge.models.qwen2 import Qwen2Bridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    class Local(Qwen2Bridge):
        _OTHER_MAPPING = {
            "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]
        }
        _MLP_MAPPING = {
            **Qwen2Bridge._MLP_MAPPING,
            "pre_mlp_layernorm.weight": [
                "model.layers.{layer_number}.post_attention_layernorm.weight"
            ],
        }

        def _get_transformer_layer_spec(self, vp_stage=None):
            spec = get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization="RMSNorm"
            )
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = causal_attention()
            return spec

    register_model("qwen2")(Local)


def settings(model, kind, tp, pp):
    """Return the arguments of an engine of verl."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

    local = {"masked_softmax_fusion": False, "attention_backend": "unfused"}
    return {
        "model_config": HFModelConfig(
            path=str(model),
            model_type=kind,
            use_remove_padding=False,
            override_config={"attn_implementation": "eager"},
        ),
        "engine_config": McoreEngineConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            vanilla_mbridge=True,
            use_remove_padding=False,
            override_transformer_config={**local, "persist_layer_norm": False},
        ),
        "optimizer_config": McoreOptimizerConfig(
            lr=1e-2, total_training_steps=10, lr_decay_steps=10
        ),
        "checkpoint_config": CheckpointConfig(),
    }


def initialize(engine, pg=None):
    """Seed Megatron's random streams, as verl does only if there is a GPU; build the model."""
    megapg.seed_all(42, pg)
    engine.initialize()


def batch(dp_rank):
    from verl.utils import tensordict_utils

    draw = torch.Generator().manual_seed(7 + dp_rank)
    lengths = (9, 12, 7, 10)
    words = [torch.randint(WORDS, (length,), generator=draw) for length in lengths]
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    data = tensordict_utils.get_tensordict(
        {
            "input_ids": nested(words),
            "loss_mask": nested([torch.ones(length) for length in lengths]),
            "temperature": torch.ones(len(lengths)),
        },
        {},
    )
    tensordict_utils.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    return data


def value_loss(model_output, data, dp_group=None):
    return ((model_output["values"].values() - 1) ** 2).mean(), {}


def train(engine, kind):
    """Return loss and gradient norm of a step, on the ranks that verl reports them from."""
    from verl.workers.utils.losses import sft_loss

    loss = partial(sft_loss, None) if kind == "language_model" else value_loss
    with engine.train_mode():
        output = engine.train_batch(batch(engine.get_data_parallel_rank()), loss)
        engine.lr_scheduler_step()
    return output.get("loss"), output.get("metrics")


def exported(engine):
    """Return the sums of the weights that verl sends to its rollouts, under Hugging Face names."""
    weights, _ = engine.get_per_tensor_param()
    return {name: tensor.float().sum().item() for name, tensor in weights}


def alone(model, kind, tp, pp):
    """Train with verl's unchanged engine, on the globals."""
    from verl.workers.engine import MegatronEngineWithLMHead, MegatronEngineWithValueHead

    plain = {"language_model": MegatronEngineWithLMHead, "value_model": MegatronEngineWithValueHead}
    with world(kind):
        engine = plain[kind](**settings(model, kind, tp, pp))
        initialize(engine)
        return [train(engine, kind) for _ in range(STEPS)], exported(engine)


def together(model):
    from verl.workers.engine import EngineRegistry

    engines = []
    for kind in (ACTOR, CRITIC):
        engine = EngineRegistry.new(kind[0], "megatron", **settings(model, *kind))
        with engine.turn as pg:
            initialize(engine, pg)
        engines.append(engine)
    actor, critic = engines
    steps = [[], []]
    with actor.session, critic.session:
        for _ in range(STEPS):
            for engine, (kind, *_), told in zip(engines, (ACTOR, CRITIC), steps, strict=True):
                told.append(train(engine, kind))
            megapg.suspend(actor.session, critic.session)
            megapg.resume(actor.session, critic.session)
            for engine in engines:
                assert engine.session.rebind(engine).complete
        return [*zip(steps, map(exported, engines), strict=True)]


def both_ways(model):
    warnings.simplefilter("ignore")
    build_of_local_layers()
    memory = mock.patch("torch.cuda.mem_get_info", return_value=(1, 1))  # verl logs it
    with memory, megatron_on_cpu(), megapg.guard("error"):
        return together(model), [alone(model, *ACTOR), alone(model, *CRITIC)]


def test_two_engines_of_different_layouts_train_as_each_does_alone(model, monkeypatch):
    lines = re.search(r"own_layouts\.py`:\n\n```python\n(.*?)```", GUIDE.read_text(), re.S)[1]
    assert len([line for line in lines.splitlines() if line]) <= 10
    (model / "own_layouts.py").write_text(lines)
    monkeypatch.syspath_prepend(model)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "own_layouts")
    preload = ("verl.workers.engine.megatron.transformer_impl",)
    ranks = run_distributed(partial(both_ways, model), 4, deadline=280, preload=preload)
    for two, single in ranks:
        assert two == single
    for model_of in (0, 1):  # verl reports losses from the last stage
        losses = [[loss for loss, _ in two[model_of][0] if loss] for two, _ in ranks]
        assert {len(set(map(tuple, each))) for each in losses if each} == {STEPS}
