"""Faults of Megatron-core itself, from NVIDIA/Megatron-LM #7452, that show on a CPU."""

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
        layout: where it shows.
        options: of the model.
        step: runs it; None: the default.
        global_sizes: of Megatron's globals.
    """

    layout: str
    options: Mapping[str, object] = field(default_factory=dict)
    step: Any = None
    global_sizes: Mapping[str, int] | None = None


def smoothed(model: Any, batch: Any, pg: Any) -> torch.Tensor:
    """The loss with smoothed labels, from logits that are cut over the vocabulary."""
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

FINDINGS: Mapping[int, Finding] = {
    1: Finding("tp=2", step=smoothed),
    2: Finding("tp=2", options={"parallel_output": False}),
    4: Finding("dp=2", options=_RECOMPUTED, global_sizes={"tp": 2}),
}
