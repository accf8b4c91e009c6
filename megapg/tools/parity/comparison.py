"""The terms of one comparison and the results of its ranks, as plain data."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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


@dataclass(frozen=True)
class Shard:
    """A part of a whole tensor, as one rank holds it.

    Attributes:
        name: name of the parameter on this rank. A tensor that is no parameter has its key.
        key: name of the whole tensor in a checkpoint.
        offset: position of the part in the whole.
        whole: shape of the whole.
        data: the values. They have as many dimensions as the whole.
        expert: True if the parameter belongs to an expert.
        resizable: True if other layouts may pad the whole otherwise.
    """

    name: str
    key: str
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    data: torch.Tensor
    expert: bool
    resizable: bool


@dataclass
class Held:
    """The results of one rank.

    Attributes:
        built: the weights as ``build`` left them.
        losses: number of the sample -> loss, of the ranks that compute it.
        again: the same, of the run with the distributed optimizer.
        outputs: module and sample -> output.
        gradients: after the backward pass, in the first step.
        counted: the gradients that the norm without the distributed optimizer counts.
        norms: gradient norm of the first step, without and with the distributed optimizer.
        weights: after each step, without and with the distributed optimizer.
        reads: places that read globals which differ from the layout, with the getter.
    """

    built: list[Shard] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)
    outputs: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    gradients: list[Shard] = field(default_factory=list)
    counted: list[Shard] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[list[list[Shard]]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)


def write(folder: Path, rank: int, held: Held) -> None:
    """Write the results of a rank to its file."""
    folder.mkdir(exist_ok=True)
    with (folder / f"{rank}.pickle").open("wb") as file:
        pickle.dump(held, file)


def read(folder: Path, rank: int) -> Held:
    """Read the results of a rank."""
    with (folder / f"{rank}.pickle").open("rb") as file:
        held: Held = pickle.load(file)  # written by our own ranks
    return held
