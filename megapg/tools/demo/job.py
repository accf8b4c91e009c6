"""A training run, its text and its result as plain data, without torch or Megatron-core."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 256  # a token is one byte of the text


def library_text() -> bytes:
    """Return a mebibyte of the standard library's sources, to train on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[: 1 << 20]


@dataclass(frozen=True)
class GPTRun:
    """One training job: its layout, the model, and the length of the training.

    Context parallelism is 1: Megatron-core has it only with TransformerEngine.
    """

    tp: int = 1  # tensor-parallel size
    pp: int = 1  # pipeline-parallel size
    vpp: int | None = None  # model chunks per pipeline stage (interleaved schedule), or None
    ep: int = 1  # expert-parallel size
    expt_tp: int | None = None  # tensor-parallel size of the experts, or None for ``tp``
    experts: int | None = None  # experts in every layer, or None for a dense model
    # needs ``tp`` > 1; Megatron-core requires it for experts with ``tp`` > 1
    sequence_parallel: bool = False
    dispatcher: str = "allgather"  # how tokens are sent to their experts: "allgather" or "alltoall"
    layers: int = 4  # transformer layers of the whole model
    hidden: int = 64  # width of the model
    heads: int = 4  # attention heads
    # the output layer has the weights of the embedding; the stages that have both then communicate
    # when the model is built
    tied: bool = True
    seq_length: int = 64  # tokens in a sample
    micro_batch_size: int = 2  # samples in a microbatch
    # microbatches of each data-parallel rank in a step; with ``vpp`` a multiple of ``pp``
    num_microbatches: int = 2
    steps: int = 4  # optimizer steps
    seed: int = 1234  # of the weights, of dropout and of the choice of samples; positive
    lr: float = 1e-3  # learning rate of Adam, constant
    # in attention and between layers; draws from the model-parallel random streams
    dropout: float = 0.1
    recompute: bool = False  # recompute every layer's activations in the backward pass


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints that a run saves or loads."""

    directory: str  # their directory
    # save one after this many steps, in the background; None saves none
    save_after: int | None = None
    resume: bool = False  # resume from the latest one


@dataclass(frozen=True)
class TrainingResult:
    """The result of :func:`megapg.tools.demo.gpt.train`."""

    # mean loss of each step, in nats per token, over the whole job; equal on every rank
    losses: tuple[float, ...]
    weights_sha256: str  # of this rank's final parameters, names and bytes
    tokens: int  # tokens the whole job trained on
    seconds: float  # wall time of the steps on this rank, without building the model
    parameters: int  # number of parameters this rank holds
    # mean loss of the step after the checkpoint that was saved or loaded, without dropout and
    # without learning from it; None if there was none
    at_checkpoint: float | None = None
