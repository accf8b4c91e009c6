"""What a training run is and what it brings home. Plain data: no torch, no Megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 256  # a token is one byte of the text


@dataclass(frozen=True)
class GPTRun:
    """One training job: the layout it is cut into, the model, and how long to train.

    Context parallelism is 1: Megatron-core has it with TransformerEngine only.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        vpp: model chunks per pipeline stage (interleaved schedule), or None.
        ep: expert-parallel size.
        expt_tp: tensor-parallel size of the experts, or None for ``tp``.
        experts: experts in every layer, or None for a dense model.
        sequence_parallel: needs ``tp`` > 1; Megatron-core wants it for experts with ``tp`` > 1.
        dispatcher: how tokens reach their experts: "allgather" or "alltoall".
        layers: transformer layers of the whole model.
        hidden: width of the model.
        heads: attention heads.
        seq_length: tokens in a sample.
        micro_batch_size: samples in a microbatch.
        num_microbatches: microbatches of each data-parallel rank in a step. With ``vpp`` a
            multiple of ``pp``.
        steps: optimizer steps.
        seed: of the weights, of dropout and of the choice of samples. Positive.
        lr: learning rate of Adam, constant.
        dropout: in attention and between layers; draws from the model-parallel random streams.
        recompute: recompute every layer's activations in the backward pass.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    expt_tp: int | None = None
    experts: int | None = None
    sequence_parallel: bool = False
    dispatcher: str = "allgather"
    layers: int = 4
    hidden: int = 64
    heads: int = 4
    seq_length: int = 64
    micro_batch_size: int = 2
    num_microbatches: int = 2
    steps: int = 4
    seed: int = 1234
    lr: float = 1e-3
    dropout: float = 0.1
    recompute: bool = False


@dataclass(frozen=True)
class Checkpoints:
    """What a run does with checkpoints.

    Attributes:
        directory: where they are.
        save_after: save one after this many steps, in the background; None saves none.
        resume: go on from the latest one.
    """

    directory: str
    save_after: int | None = None
    resume: bool = False


@dataclass(frozen=True)
class TrainingResult:
    """What :func:`train` did.

    Attributes:
        losses: mean loss of each step it did, in nats per token, over the whole job; equal on every
            rank.
        weights_sha256: of this rank's final parameters, names and bytes.
        tokens: tokens the whole job trained on.
        seconds: wall time of the steps on this rank, without building the model.
        parameters: number of parameters this rank holds.
        at_checkpoint: mean loss of the step after the checkpoint that was saved or loaded, without
            dropout and without learning from it; None where there was none.
    """

    losses: tuple[float, ...]
    weights_sha256: str
    tokens: int
    seconds: float
    parameters: int
    at_checkpoint: float | None = None
