"""Faults of Megatron-core that show on a CPU, by their number upstream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        layout: a layout that shows it.
        before: the first core without it; empty: every core has it.
        model: the built-in model.
        options: of the model.
        step: runs it; None: the default.
        global_sizes: of Megatron's globals.
    """

    layout: str
    before: str = ""
    model: str = "gpt"
    options: Mapping[str, object] = field(default_factory=dict)
    step: Any = None
    global_sizes: Mapping[str, int] | None = None


def smoothed(model: Any, batch: Any, pg: Any) -> torch.Tensor:
    """Return the loss with smoothed labels, from logits that are sharded over the vocabulary."""
    logits = model(batch["tokens"], batch["positions"], None)
    if logits.shape[:2] != batch["tokens"].shape:  # not the last stage
        return logits
    return vocab_parallel_cross_entropy(
        logits.transpose(0, 1).contiguous(), batch["labels"].transpose(0, 1).contiguous(), 0.1
    )


_RECOMPUTED = {
    "mtp": 1,
    "tied": False,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "distribute_saved_activations": True,
}

_BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "calculate_per_token_loss": True,
}

FINDINGS: Mapping[str, Finding] = {
    "#7452, finding 1: smoothed labels": Finding("tp=2", step=smoothed),
    "#7452, finding 2: gathered logits": Finding("tp=2", options={"parallel_output": False}),
    "#7452, finding 4: recomputed predictions": Finding(
        "dp=2", options=_RECOMPUTED, global_sizes={"tp": 2}
    ),
    "#7452, finding 8: attention sinks": Finding("tp=2", options={"softmax_type": "learnable"}),
    "#5047: balancing loss per token": Finding(
        "tp=2", before="0.19", model="moe", options=_BALANCED
    ),
    "#7577: tied embeddings and predictions": Finding("pp=2", options={"mtp": 1}),
}
