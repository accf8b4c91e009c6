"""One training step of a model in a layout: the job, and its memory and traffic by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megapg.layout import GroupName, ParallelLayout

_TOKENS = 4 * 2**20  # of a step
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    Attributes:
        model: name of a preset, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.
        seq_length: tokens of a sample.
        micro_batch_size: samples of a microbatch.
        microbatches: microbatches of a pipeline in one step.
        recompute: the activations that the backward pass computes again: none, those of the
            attention core (selective), or those of whole layers (full).
        distributed_optimizer: True if each data parallel rank has a part of the optimizer's state.
    """

    model: str
    seq_length: int
    micro_batch_size: int = 1
    microbatches: int = 1
    recompute: Recompute = "none"
    distributed_optimizer: bool = True


def default_samples(world_size: int, seq_length: int) -> int:
    """Return the samples of a step of at least four million tokens.

    The number is the odd part of the world size times a power of two, so that many data parallel
    sizes divide it.
    """
    odd = world_size // (world_size & -world_size)
    return odd << max(0, math.ceil(math.log2(_TOKENS / (seq_length * odd))))


def default_microbatches(layout: ParallelLayout, seq_length: int, micro_batch_size: int) -> int:
    """Return the microbatches of a pipeline in a step of ``default_samples``, or a few more."""
    samples = default_samples(layout.world_size, seq_length)
    unit = layout.pp if layout.vpp else 1  # Megatron-core interleaves only multiples of pp
    return unit * math.ceil(samples / (layout.dp * micro_batch_size * unit))


@dataclass(frozen=True)
class Flow:
    """Equal collectives of one rank in one training step.

    Attributes:
        field: the field of the group.
        collective: its name in torch, such as ``all_reduce``, or ``send`` and ``recv``.
        count: number of calls.
        bytes: bytes of all calls, counted as by :func:`megapg.testing.count_traffic`.
        crossing: share of the bytes that go over the network, from 0 to 1. See
            :func:`megapg.tools.plan.spans.over_network`.
    """

    field: GroupName
    collective: str
    count: int
    bytes: int
    crossing: float


@dataclass(frozen=True)
class StageCost:
    """What a rank of one pipeline stage holds and sends.

    Attributes:
        stage: its number.
        rank: the rank that was looked at. The others of the stage have equal numbers.
        weights: number of parameters of the rank.
        parameters: bytes of the parameters.
        gradients: bytes of the gradient buffers.
        optimizer: bytes of the optimizer's state, with the main copy of the parameters.
        activations: most bytes that the backward pass keeps at a time.
        communicators: least and most bytes of the NCCL communicators.
        flows: the traffic of a step.
    """

    stage: int
    rank: int
    weights: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    communicators: tuple[int, int]
    flows: tuple[Flow, ...]

    @property
    def total(self) -> int:
        """All bytes, with the most that communicators take."""
        held = self.parameters + self.gradients + self.optimizer + self.activations
        return held + self.communicators[1]


@dataclass(frozen=True)
class Training:
    """One training step of a job in a layout.

    Attributes:
        job: what is trained.
        weights: number of parameters of the whole model.
        stages: the cost of a rank of each pipeline stage, in order.
    """

    job: Job
    weights: int
    stages: tuple[StageCost, ...]

    @property
    def fields(self) -> set[GroupName]:
        """The fields whose groups communicate in a step."""
        return {flow.field for stage in self.stages for flow in stage.flows}

    @property
    def fullest(self) -> StageCost:
        """The stage whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.total)
