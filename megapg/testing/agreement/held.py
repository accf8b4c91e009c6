"""The results of one rank, and the file that brings them to the comparison."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

import torch


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
        norms: gradient norm of the first step, without and with the distributed optimizer.
        weights: after each step, without and with the distributed optimizer.
        moved: random streams that the step drew from.
    """

    built: list[Shard] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    again: dict[int, float] = field(default_factory=dict)
    outputs: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    gradients: list[Shard] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[list[list[Shard]]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)


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
