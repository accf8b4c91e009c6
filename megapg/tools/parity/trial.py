"""One rank's part: build the model, load the common weights, train two steps, keep the results.

It does so twice: without and with the distributed optimizer.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import unwrap_model

import megapg
from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointError, LayoutError, ParityInputError
from megapg.megatron import check_embeddings, schedule_collection, trace_global_reads
from megapg.megatron.core import gradients_in_norm
from megapg.megatron.watching.alive import differing, layouts
from megapg.testing import megatron_on_cpu
from megapg.testing.double import float64_for_float32
from megapg.tools.parity import inputs
from megapg.tools.parity.built_in import next_token, random_tokens
from megapg.tools.parity.cases import SIZES, LayoutCase
from megapg.tools.parity.comparison import (
    REFERENCE,
    SEED,
    STEPS,
    Batch,
    Held,
    Job,
    write,
)
from megapg.tools.parity.shards import Shards

_LR = 1e-2
_EPSILON = 1e-3  # of Adam; so large that rounding of a gradient near zero moves no weight
_NO_CLIPPING = 1e9  # the norm is computed, and a wrong one changes nothing else


def run_rank(job: Job, case: LayoutCase, number: int | None) -> None:
    """Train in one layout and leave the result in a file. Every rank of the layout calls it.

    Args:
        job: the comparison.
        case: the layout.
        number: of the layout. None: this is the reference, which saves the weights first.
    """
    warnings.simplefilter("ignore")  # Megatron-core's, about the CPU
    logging.getLogger("megatron").setLevel(logging.ERROR)
    held = Held()
    precision = float64_for_float32() if job.double else contextlib.nullcontext()
    timeout = timedelta(seconds=job.collective_timeout)
    with (
        megatron_on_cpu(),
        precision,
        megapg.session(case.layout, collective_timeout=timeout) as session,
        _globals(job, case, session.groups, held),
    ):
        for distributed in (False, True):
            trial = Trial(job, case, session.groups, distributed)
            trial.load(save=number is None and not distributed)
            trial.train(held)
            del trial
        rank = session.rank
    place = REFERENCE if number is None else str(number)
    write(Path(job.directory, place), rank, held)


@contextlib.contextmanager
def _globals(job: Job, case: LayoutCase, pg: ProcessGroupCollection, held: Held) -> Iterator[None]:
    """Make Megatron's globals return these groups; or groups of other sizes, and keep the reads."""
    if job.global_sizes is None or case.world_size == 1:
        with megapg.published(pg):
            yield
        return
    layout = case.globals_of(job.global_sizes)
    with (
        megapg.session(layout, name="globals") as other,
        megapg.published(other.groups),
        megapg.guard("off"),  # the caller wants the wrong numbers
        trace_global_reads() as trace,
    ):
        yield
        fields = differing(layouts())
        held.reads = [
            f"{read.module}:{read.line} ({read.getter})"
            for read in trace.reads
            if fields.intersection(read.field.split(", "))
        ]


class Trial:
    """One model with its optimizer, from building it to the last step."""

    def __init__(
        self, job: Job, case: LayoutCase, pg: ProcessGroupCollection, distributed: bool
    ) -> None:
        self._job, self._case, self._pg = job, case, pg
        self._distributed = distributed
        # Another seed the second time, so that a step that draws random numbers differs.
        megapg.seed_all(SEED + distributed, pg)
        self._plain = self._build()
        self._config: Any = self._plain[0].config
        self._prepare_config()
        with inputs.naming(f"layout {case.text!r}: sharded_state_dict of the model"):
            self._shards = Shards(self._plain, pg)
        inputs.check_described(self._shards.undescribed, case)
        inputs.check_same_build(self._shards.of(), pg, case)
        self._built = self._shards.of()

    def _build(self) -> list[torch.nn.Module]:
        job, case, pg = self._job, self._case, self._pg
        build: Any = job.build
        options = {**job.options, **case.options}
        words = f". {', '.join(case.options)} went to build; the sizes are {', '.join(SIZES)}."
        with inputs.naming(f"layout {case.text!r}: build", words if case.options else ""):
            if case.layout.vpp and "vp_stage" in inspect.signature(build).parameters:
                made = [build(pg, vp_stage=n, **options) for n in range(case.layout.vpp)]
            else:
                made = build(pg, **options)
        chunks = inputs.chunks_of(made, case, pg)
        try:
            check_embeddings(chunks)
        except LayoutError as error:
            raise ParityInputError(f"layout {case.text!r}: {error}") from error
        for module in (module for chunk in chunks for module in chunk.modules()):
            without_dropout(module)
            without_dropout(getattr(module, "config", None))
        return chunks

    def _prepare_config(self) -> None:
        config, vpp = self._config, self._case.layout.vpp
        config.finalize_model_grads_func = finalize_model_grads
        if config.pipeline_dtype is None:
            config.pipeline_dtype = torch.float32
        # With two interleaved stages, batched p2p pairs messages wrongly on gloo.
        config.overlap_p2p_comm, config.batch_p2p_comm = vpp is not None, vpp is None

    def load(self, *, save: bool) -> None:
        """Load the common weights. With ``save``, save this model's weights as the common ones."""
        common = Path(self._job.directory, "weights")
        if save:
            _vary(self._plain)
            with inputs.naming("one rank: saving the model"):
                megapg.save_checkpoint(common, 0, model=self._plain, pg_collection=self._pg)
            return
        try:
            megapg.load_checkpoint(common, model=self._plain, pg_collection=self._pg, rng=False)
        except CheckpointError as error:
            raise ParityInputError(
                f"layout {self._case.text!r}: the model is not the one of a single rank: {error} "
                "Let build make the same model for every layout, cut by pg."
            ) from error

    def train(self, held: Held) -> None:
        """Train two steps, and put the results into ``held``."""
        wrapped = self._wrapped()
        optimizer: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=_LR,
                adam_eps=_EPSILON,
                clip_grad=_NO_CLIPPING,
                use_distributed_optimizer=self._distributed,
            ),
            wrapped,
            use_gloo_process_groups=False,
            pg_collection=self._pg,
        )
        shards = Shards(wrapped, self._pg)  # the weights have moved into a buffer
        outputs = Outputs([] if self._distributed else wrapped)
        weights = []
        for step in range(STEPS):
            for chunk in wrapped:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            losses = self._forward_backward(wrapped, outputs)
            if step == 0 and not self._distributed:
                outputs.stop()
                held.built, held.outputs, held.losses = self._built, outputs.found, losses
                held.gradients = shards.of(_gradient)
            elif step == 0:
                held.again = losses
            _, norm, _ = optimizer.step()
            weights.append(shards.of())
            if step == 0:
                held.norms.append(float(norm))
            if step == 0 and not self._distributed:
                counted = gradients_in_norm(optimizer)
                held.counted = shards.of(partial(_among, counted))
        held.weights.append(weights)

    def _wrapped(self) -> list[Any]:
        instances = self._case.layout.optimizer_instances if self._distributed else 1
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=self._distributed,
            num_distributed_optimizer_instances=instances,
        )
        wrapped = [
            DistributedDataParallel(
                self._config, config, chunk, disable_bucketing=stage > 0, pg_collection=self._pg
            )
            for stage, chunk in enumerate(self._plain)
        ]
        several = len(wrapped) > 1
        self._config.no_sync_func = (
            [chunk.no_sync for chunk in wrapped] if several else wrapped[0].no_sync
        )
        return wrapped

    def _forward_backward(self, wrapped: Sequence[Any], outputs: Outputs) -> dict[int, float]:
        """Run this rank's share of the global batch, and return the loss of each sample."""
        pg, layout, job = self._pg, self._case.layout, self._job
        step = job.step or next_token
        seq_length, sample = random_tokens(job, unwrap_model(list(wrapped))[0], pg)
        losses: dict[int, float] = {}

        def forward_step(batches: Iterator[tuple[int, Batch]], model: Any) -> Any:
            number, batch = next(batches)
            with outputs.at(number):
                output = step(model, batch, pg)
            return output, partial(self._loss, losses, number)

        def batches() -> Iterator[tuple[int, Batch]]:
            for number in range(pg.rank("dp"), job.samples, pg.size("dp")):
                yield number, sample(number)

        get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp)(
            forward_step_func=forward_step,
            data_iterator=[batches() for _ in wrapped] if len(wrapped) > 1 else batches(),
            model=list(wrapped),
            num_microbatches=job.samples // pg.size("dp"),
            seq_length=seq_length,
            micro_batch_size=1,
            decoder_seq_length=seq_length,
            pg_collection=schedule_collection(pg),
            p2p_communicator=P2PCommunicator(pg.pp, self._config),
        )
        return losses

    def _loss(
        self, losses: dict[int, float], number: int, output: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        mean = output.mean()
        known = losses[number] = float(mean.detach())
        if self._config.calculate_per_token_loss:
            tokens = torch.tensor(output.numel())
            return output.sum(), tokens, known  # type: ignore[return-value]
        # The schedule expects the rank's share of the loss over the whole sequence.
        return mean / self._case.layout.cp, known  # type: ignore[return-value]


class Outputs:
    """The outputs of the modules that have parameters of their own, as forward passes run.

    Attributes:
        found: name of the module's first parameter, and number of the sample -> output, in the
            order in which the modules ran.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.found: dict[tuple[str, int], torch.Tensor] = {}
        self._sample: int | None = None  # None: not in a forward pass, or in its recomputation
        self._hooks = []
        plain = unwrap_model(list(chunks))
        for number, chunk in enumerate(plain):
            prefix = f"chunk {number}: " if len(plain) > 1 else ""
            for name, module in chunk.named_modules():
                own = next(iter(module.named_parameters(recurse=False)), None)
                if own is not None and getattr(own[1], "allreduce", True):
                    full = prefix + ".".join(filter(None, (name, own[0])))
                    self._hooks.append(module.register_forward_hook(partial(self._keep, full)))

    def _keep(self, name: str, module: object, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if self._sample is not None and isinstance(first, torch.Tensor):
            self.found.setdefault((name, self._sample), first.detach().clone())

    @contextlib.contextmanager
    def at(self, sample: int) -> Iterator[None]:
        """Record the outputs of the block's forward pass for this sample. Errors get places."""
        self._sample = sample
        try:
            yield
        except Exception as error:
            error.add_note(inputs.places(error))
            raise
        finally:
            self._sample = None

    def stop(self) -> None:
        """Record nothing more."""
        for hook in self._hooks:
            hook.remove()


def without_dropout(holder: object) -> None:
    """Turn dropout off in a module or in a config."""
    if isinstance(holder, torch.nn.Dropout):
        holder.p = 0.0
    for name in ("hidden_dropout", "attention_dropout"):
        if isinstance(getattr(holder, name, None), float):
            setattr(holder, name, 0.0)


def _vary(chunks: Sequence[torch.nn.Module]) -> None:
    """Change parameters whose elements are all equal: a bias of zeros would hide a fault."""
    generator = torch.Generator().manual_seed(SEED)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        first = parameter.detach().reshape(-1)[:1]
        if parameter.numel() > 1 and parameter.is_floating_point() and (parameter == first).all():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.data.add_(noise, alpha=0.1)


def _among(gradients: Sequence[torch.Tensor], parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient if it is among these."""
    return next((each for each in gradients if each is parameter.grad), None)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return gradient
