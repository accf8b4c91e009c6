"""Layouts with the same results as one rank: the model, its options, and its sharding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)


@dataclass(frozen=True)
class Sound:
    """One model in several layouts.

    Attributes:
        model: a built-in name, or a build function.
        layouts: the sharding of each, separated by semicolons.
        options: keyword arguments of the build function, in every layout.
    """

    model: Any
    layouts: str
    options: Mapping[str, object] = field(default_factory=dict)


def without_attention(pg: Any) -> GPTModel:
    """Build a GPT without attention, its only layer that communicates over cp."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=pg.size("tp"),
        context_parallel_size=pg.size("cp"),
        pipeline_dtype=torch.float32,
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
        ),
    )
    return GPTModel(config, layer, 64, 16, position_embedding_type="none", pg_collection=pg)


_GATED = {
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "qk_layernorm": True,
}
_RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

_BALANCED = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
}

SOUND: Mapping[str, Sound] = {
    "dense": Sound(
        "gpt",
        "tp=2; tp=4; pp=2; pp=4; dp=2; dp=4; tp=2 pp=2; tp=2 dp=2; pp=2 dp=2; tp=2 pp=2 dp=2; "
        "tp=2 sequence_parallel; tp=4 sequence_parallel; tp=2 pp=2 sequence_parallel; "
        "tp=2 dp=2 sequence_parallel; pp=2 vpp=2; tp=2 pp=2 vpp=2; pp=2 dp=2 vpp=2",
    ),
    "untied embeddings": Sound("gpt", "tp=2; pp=2; tp=2 pp=2; pp=2 vpp=2", {"tied": False}),
    "learned positions": Sound(
        "gpt", "tp=2 sequence_parallel; pp=2", {"positions": "learned_absolute"}
    ),
    "grouped queries": Sound(
        "gpt", "tp=2; tp=2 pp=2; tp=2 dp=2 sequence_parallel", {"num_query_groups": 2}
    ),
    "gated, RMSNorm, norms of q and k": Sound(
        "gpt", "tp=2; tp=2 sequence_parallel; tp=2 pp=2; dp=2", _GATED
    ),
    "recomputed": Sound("gpt", "tp=2; pp=2; tp=2 sequence_parallel", _RECOMPUTED),
    "loss per token": Sound("gpt", "dp=2; tp=2 pp=2", {"calculate_per_token_loss": True}),
    "two tokens predicted": Sound("gpt", "tp=2; dp=2", {"mtp": 1}),
    "two tokens predicted, untied": Sound(
        "gpt", "tp=2; pp=2; tp=2 sequence_parallel", {"mtp": 1, "tied": False}
    ),
    "experts, allgather": Sound(
        "moe",
        "ep=2; ep=4; tp=2; tp=2 ep=2; tp=2 ep=2 expt_tp=1; tp=2 ep=2 expt_tp=1 world=2; "
        "pp=2 ep=2; ep=2 dp=2",
    ),
    "experts, alltoall": Sound(
        "moe",
        "ep=2; ep=4; tp=2; tp=2 ep=2; tp=2 ep=2 expt_tp=1; pp=2 ep=2 vpp=2; ep=2 dp=2",
        {"dispatcher": "alltoall"},
    ),
    "experts, balanced": Sound(
        "moe",
        "ep=2; tp=2; dp=2",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    ),
    "experts, balanced by sequence": Sound("moe", "ep=2; tp=2", _BALANCED),
    "experts, balanced by bias": Sound(
        "moe",
        "tp=2; dp=2",
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ),
    "experts, one shared": Sound(
        "moe",
        "ep=2; tp=2 ep=2",
        {"moe_shared_expert_intermediate_size": 32, "dispatcher": "alltoall"},
    ),
    "T5": Sound("t5", "tp=2; dp=2; tp=2 dp=2; tp=2 sequence_parallel"),
    "no attention": Sound(without_attention, "cp=2; tp=2 cp=2; cp=2 dp=2"),
}
