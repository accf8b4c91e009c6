"""Small models and inputs for the corpus."""

from dataclasses import replace

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megapg.tools.demo import gpt as demo
from megapg.tools.demo.job import GPTRun

VOCABULARY = 32
LENGTH = 8


def config(pg, **changes):
    """Return a configuration of one layer for the sizes of a collection."""
    sizes = {
        "tensor_model_parallel_size": pg.size("tp"),
        "pipeline_model_parallel_size": pg.size("pp"),
        "context_parallel_size": pg.size("cp"),
        "expert_model_parallel_size": pg.size("ep"),
        "expert_tensor_parallel_size": pg.size("expt_tp"),
    }
    small = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
    }
    if pg.size("pp") > 1:
        small["pipeline_dtype"] = torch.float32
    return TransformerConfig(**{**small, **sizes, **changes})


def gpt(pg, experts=None, **changes):
    """Build a GPT of one layer on a collection."""
    return GPTModel(
        config(pg, num_moe_experts=experts, **changes),
        get_gpt_layer_local_spec(num_experts=experts),
        VOCABULARY,
        LENGTH,
        pg_collection=pg,
    )


def moe_layer(pg, **options):
    """Build an MoE layer of four experts from the layer specification."""
    made = config(pg, num_moe_experts=4, add_bias_linear=False)
    part = get_gpt_layer_local_spec(num_experts=4).submodules.mlp
    if isinstance(part, ModuleSpec):
        return build_module(part, config=made, layer_number=1, **options)
    return part(config=made, layer_number=1, **options)


def tokens(batch=1):
    """Return the same tokens on every rank."""
    return torch.arange(batch * LENGTH).view(batch, LENGTH) % VOCABULARY


def share(pg, axis="tp", width=VOCABULARY, rows=4):
    """Return this rank's columns of a matrix that is split over the ranks of ``axis``."""
    whole = torch.linspace(-1, 3, rows * width).view(rows, width)
    return whole.chunk(pg.size(axis), dim=1)[pg.rank(axis)].contiguous()


TEXT = bytes(range(256)) * 2
TINY = GPTRun(layers=1, hidden=16, heads=2, seq_length=8, micro_batch_size=1, steps=2)


def run_of(pg, **changes):
    """Return a training job of two steps for the sizes of a collection."""
    sizes = {"tp": pg.size("tp"), "pp": pg.size("pp"), "ep": pg.size("ep")}
    if changes.get("experts"):
        sizes["expt_tp"] = pg.size("expt_tp")
    return replace(TINY, **{**sizes, "layers": pg.size("pp"), **changes})


def train(pg, passed=True, **changes):
    """Train with distributed optimizer and overlapped DDP; return the loss of each step.

    Without ``passed`` the code is a script on the globals, which has no collection.
    """
    return demo.train(run_of(pg, **changes), TEXT, pg if passed else None).losses
