"""The terms of one comparison, as plain data that travels by pickle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    from megapg.collection import ProcessGroupCollection

Batch: TypeAlias = Mapping[str, "torch.Tensor"]
Chunks: TypeAlias = "torch.nn.Module | Sequence[torch.nn.Module]"


Build: TypeAlias = Callable[..., Chunks]
"""Makes this rank's part of the model from its groups: ``build(pg)``.

With virtual pipeline stages it is called once per chunk if it takes ``vp_stage``; otherwise it
returns the list of chunks. Words of a layout that are no sizes arrive as keyword arguments.
"""

Step: TypeAlias = Callable[["torch.nn.Module", Batch, "ProcessGroupCollection"], "torch.Tensor"]
"""Runs one chunk on one sample. It returns the loss on the last stage; before that, the output."""

Sample: TypeAlias = Callable[[int], Batch]
"""Makes sample number n of the global batch, the same on every rank."""

STEPS = 2
SEED = 1234
REFERENCE = "reference"  # folder for the results of one rank

LOSS, GRADIENTS, NORM = "loss", "gradients", "gradient norm"
WEIGHTS, SHARDED_WEIGHTS, REPLICAS = "weights", "weights (distributed optimizer)", "replicas"
CHECKS = (LOSS, GRADIENTS, NORM, WEIGHTS, SHARDED_WEIGHTS, REPLICAS)


@dataclass(frozen=True)
class Job:
    """One comparison.

    Attributes:
        build: makes the model.
        step: runs one chunk on one sample; None: next-token loss.
        sample: makes the samples; None: random tokens.
        directory: folder for the checkpoint and for the results of the ranks.
        double: compute in float64.
        samples: size of the global batch. A microbatch is one sample.
        seq_length: tokens in a sample; 0: the model's, at most 16.
        vocab_size: number of different tokens; 0: the model's.
        global_sizes: sizes of the groups in Megatron's globals; None: the layout's groups.
        options: keyword arguments for ``build`` in every layout, the reference included.
        collective_timeout: seconds that a collective may wait.
    """

    build: Build
    step: Step | None
    sample: Sample | None
    directory: str
    double: bool
    samples: int
    seq_length: int = 0
    vocab_size: int = 0
    global_sizes: Mapping[str, int] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    collective_timeout: float = 60.0
