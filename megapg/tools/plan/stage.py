"""One pipeline stage, built without weights, and a training step of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from megapg.collection import ProcessGroupCollection
from megapg.layout import GroupName
from megapg.megatron import schedule_collection
from megapg.testing.traffic import Collective, count_traffic
from megapg.tools.plan.models import Model
from megapg.tools.plan.repeats import Known, Ran, run_layers
from megapg.tools.plan.saved import Saved, storages
from megapg.tools.plan.training import Job

_EMBEDDINGS: tuple[GroupName, ...] = ("embd", "pos_embd")


@dataclass(frozen=True)
class Shape:
    """The parameters of a stage. Stages of one shape cost the same.

    Attributes:
        chunks: for each chunk, name, size and type of each parameter, and True if it is trained.
        embeddings: number of ranks that share the word and the position embeddings.
    """

    chunks: tuple[tuple[tuple[str, tuple[int, ...], str, bool], ...], ...]
    embeddings: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """The memory and the collectives of a rank, without the messages between stages.

    Attributes:
        weights: number of parameters of the rank.
        of_stage: number of parameters of all ranks of the stage, replicas counted once.
        parameters, gradients, optimizer: bytes.
        kept: bytes of activations of a microbatch after the forward pass, for each chunk.
        peaks: most bytes of activations of a microbatch in the backward pass, for each chunk.
        microbatch: the collectives of one microbatch, for each chunk.
        step: the collectives of a step after its microbatches.
        boundary: bytes of a microbatch's activations between two stages.
    """

    weights: int
    of_stage: int
    parameters: int
    gradients: int
    optimizer: int
    kept: tuple[int, ...]
    peaks: tuple[int, ...]
    microbatch: tuple[tuple[Collective, ...], ...]
    step: tuple[Collective, ...]
    boundary: int


class Stage:
    """The chunks of a model that one rank holds."""

    def __init__(self, model: Model, pg: ProcessGroupCollection, job: Job, known: Known) -> None:
        layout = pg.layout
        assert layout is not None
        self._pg, self._job, self._layout, self._known = pg, job, layout, known
        numbers = range(layout.vpp) if layout.vpp else (None,)
        self._plain: list[Any] = [model.build(pg, number, job=job) for number in numbers]
        self._config: Any = self._plain[0].config
        groups = [layout.members(field, pg.ranks("pp")[pg.rank("pp")]) for field in _EMBEDDINGS]
        self.shape = Shape(tuple(map(_shape, self._plain)), tuple(map(len, groups)))

    def measure(self) -> Measured:
        """Run one step, and count."""
        chunks = [self._wrapped(*each) for each in enumerate(self._plain)]
        parameters = [each for chunk in chunks for each in chunk.parameters()]
        weights = storages(parameters)
        gradients = storages(each.main_grad for each in parameters if each.requires_grad)
        optimizer: Any = self._optimizer(chunks)
        ran = []
        for chunk in chunks:
            run = partial(self._microbatch, chunk, {*weights, *gradients})
            ran.append(run_layers(chunk, partial(self._known.run, self._pg, self._job, chunk, run)))
        optimizer.step()  # the first step has more collectives in Megatron-core 0.19
        with count_traffic(self._pg) as traffic:
            tokens = torch.zeros(1, dtype=torch.int) if self._per_token else None
            groups = schedule_collection(self._pg)
            finalize_model_grads(chunks, tokens, pg_collection=groups)
            optimizer.step()
        state = storages(_state_of(optimizer), without=weights)
        length, hidden = self._sequence, self._config.hidden_size
        size = (self._config.pipeline_dtype or self._config.params_dtype).itemsize
        return Measured(
            weights=sum(each.numel() for each in parameters),
            of_stage=sum(
                each.numel() * self._pieces(name, each)
                for chunk in chunks
                for name, each in chunk.named_parameters()
            ),
            parameters=sum(weights.values()),
            gradients=sum(gradients.values()),
            optimizer=sum(state.values()),
            kept=tuple(each.kept for each in ran),
            peaks=tuple(each.peak for each in ran),
            microbatch=tuple(each.rows for each in ran),
            step=traffic.rows,
            boundary=length * self._job.micro_batch_size * hidden * size,
        )

    @property
    def _per_token(self) -> bool:
        return bool(self._config.calculate_per_token_loss)

    @property
    def _sequence(self) -> int:
        """Number of tokens of a sample that this rank has between two layers."""
        own = self._job.seq_length // self._pg.size("cp")
        return own // self._pg.size("tp") if self._config.sequence_parallel else own

    def _wrapped(self, number: int, chunk: Any) -> Any:
        """Wrap a chunk as ``megatron.training`` does."""
        config = self._config
        if config.bf16 or config.fp16:
            chunk = Float16Module(config, chunk)
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=self._job.distributed_optimizer,
            num_distributed_optimizer_instances=self._layout.optimizer_instances,
            grad_reduce_in_fp32=bool(config.bf16),
        )
        return DistributedDataParallel(
            config, options, chunk, disable_bucketing=number > 0, pg_collection=self._pg
        )

    def _optimizer(self, chunks: Sequence[Any]) -> object:
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=self._config.bf16,
            fp16=self._config.fp16,
            params_dtype=self._config.params_dtype,
            use_distributed_optimizer=self._job.distributed_optimizer,
        )
        return get_megatron_optimizer(
            config, list(chunks), use_gloo_process_groups=False, pg_collection=self._pg
        )

    def _microbatch(self, chunk: Any, excluded: Iterable[int]) -> Ran:
        """Run a microbatch; return its collectives, and the bytes kept and at the peak."""
        job, plain = self._job, unwrap_model(chunk)
        buffers = storages(plain.buffers())
        saved = Saved({*excluded, *buffers})
        shape = job.micro_batch_size, job.seq_length // self._pg.size("cp")
        tokens = torch.zeros(shape, dtype=torch.int64)
        with count_traffic(self._pg) as traffic, saved.watched():
            if not plain.pre_process:
                hidden = (self._sequence, job.micro_batch_size, self._config.hidden_size)
                kind = self._config.pipeline_dtype or self._config.params_dtype
                given = torch.empty(hidden, dtype=kind, requires_grad=True)
                plain.set_input_tensor([given])
            output = chunk(tokens, tokens, None, labels=tokens)
            if plain.post_process:
                output = output.float().mean()
            kept = saved.bytes
            if output.requires_grad:  # as Megatron-core's schedules ask
                torch.autograd.backward(output, torch.empty_like(output))
        return Ran(traffic.rows, kept, saved.most)

    def _pieces(self, name: str, parameter: torch.nn.Parameter) -> int:
        """Return how many ranks of a stage hold different pieces of a parameter."""
        if getattr(parameter, "shared", False):  # a copy of the first stage's
            return 0
        expert = ".experts." in name  # Megatron-core marks experts only if ep > 1
        sharded = getattr(parameter, "tensor_model_parallel", False)
        pieces = self._pg.size("ep") if expert else 1
        return pieces * (self._pg.size("expt_tp" if expert else "tp") if sharded else 1)


def _shape(chunk: torch.nn.Module) -> tuple[tuple[str, tuple[int, ...], str, bool], ...]:
    return tuple(
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in chunk.named_parameters()
    )


def _state_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the main copies of the parameters, and what Adam keeps of each, without counters."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # Megatron-core's, for no parameters
            continue
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                yield main
                kept = part.optimizer.state[main].values()
                yield from (each for each in kept if isinstance(each, torch.Tensor) and each.dim())
