"""Problems of a training step in a layout. A cure is counted again before it is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megapg.errors import MegapgError
from megapg.layout import ParallelLayout
from megapg.plan.bars import text_of_bytes
from megapg.plan.cluster import Cluster
from megapg.plan.findings import Finding, changed
from megapg.plan.training import Job, Training

Measure = Callable[[ParallelLayout, Job], Training]

_UNEVEN = 1.2  # the fullest stage, by the mean of all
_FULL = 0.5  # of a GPU. If less is held, uneven stages do no harm.
_TRIES = 2  # each counts a whole model


def find_in_training(
    layout: ParallelLayout,
    cluster: Cluster,
    training: Training,
    measure: Measure,
    known: Sequence[Finding],
) -> list[Finding]:
    """Return the problems of a layout that the model has, too.

    Args:
        layout: the layout.
        cluster: the machines.
        training: a step in the layout.
        measure: counts a step in another layout, or of another job.
        known: the problems that show without a model.
    """
    found = list(known)
    if layout.ep > 1 and not training.fields & {"ep", "tp_ep"}:
        found = [each for each in known if each.code != "ep-leaves-nvlink"]
        what = f"no group of ep communicates: {training.job.model} has no experts."
        found.append(Finding("no-experts", what, f"Leave out --ep {layout.ep}."))
    step = _Step(layout, cluster, training, measure)
    of_memory = [*_out_of_memory(step)] or [*_uneven(step)]
    return [*found, *of_memory, *_communicators(training)]


@dataclass(frozen=True)
class _Step:
    """A training step in a layout, and how another one is counted."""

    layout: ParallelLayout
    cluster: Cluster
    training: Training
    measure: Measure

    @property
    def limit(self) -> float:
        """Bytes of a GPU."""
        return self.cluster.memory_gb.value * 10**9


@dataclass(frozen=True)
class _Change:
    """Another layout or job.

    Attributes:
        options: of the command.
        layout: the layout.
        job: the job.
        least: no fewer bytes of the fullest rank can be expected.
    """

    options: str
    layout: ParallelLayout
    job: Job
    least: float


def _out_of_memory(step: _Step) -> Iterator[Finding]:
    full = step.training.fullest
    if full.total <= step.limit:
        return
    what = (
        f"out of memory: a rank of stage {full.stage} holds {text_of_bytes(full.total)}, and a GPU "
        f"has {step.cluster.memory_gb.value:g} GB."
    )
    hopeful = (each for each in _changes(step) if each.least <= step.limit)
    for change in itertools.islice(hopeful, _TRIES):
        tried = _try(step, change)
        if tried and (most := tried.fullest.total) <= step.limit:
            name = change.options[0].upper() + change.options[1:]
            cure = f"{name} fits. The fullest rank then holds {text_of_bytes(most)}."
            yield Finding("out-of-memory", what, cure)
            return
    yield Finding("out-of-memory", what, "Take more ranks, or GPUs with more memory.")


def _changes(step: _Step) -> Iterator[_Change]:
    """Yield changes that take less memory, the cheapest first."""
    job, full, layout = step.training.job, step.training.fullest, step.layout
    fixed = full.communicators[1] + full.parameters + full.gradients
    share = full.optimizer / len(layout.members("dp_cp", full.rank))
    jobs = [*_jobs(job)]
    for options, other in jobs:
        optimizer = full.optimizer if job.distributed_optimizer else share
        activations = 0 if other.recompute != job.recompute else full.activations
        yield _Change(options, layout, other, fixed + optimizer + activations)
    for options, other in (("", job), *jobs[-1:]):
        activations = 0 if other.recompute != job.recompute else full.activations
        for sizes, grown, factor in _grown(layout, step.cluster):
            split = (full.parameters + full.gradients + activations) / factor
            named = f"{sizes} with {options}" if options else sizes
            yield _Change(named, grown, other, split + full.communicators[0])


def _jobs(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield jobs of less memory, with the options that ask for them."""
    other, also = replace(job, distributed_optimizer=True), ""
    if not job.distributed_optimizer:
        yield "a distributed optimizer", other
        also = " and a distributed optimizer"
    if job.recompute != "full":
        yield f"--recompute full{also}", replace(other, recompute="full")


def _grown(layout: ParallelLayout, cluster: Cluster) -> Iterator[tuple[str, ParallelLayout, int]]:
    """Yield layouts with a larger tp inside NVLink or a larger pp, and the factor."""
    for factor in (2, 4, 8):
        for tensor in (factor, 1):
            tp, pp = layout.tp * tensor, layout.pp * factor // tensor
            if tp > max(cluster.domain_size, layout.tp):
                continue
            expt_tp = tp if layout.expt_tp == layout.tp else layout.expt_tp
            if grown := changed(layout, tp=tp, pp=pp, expt_tp=expt_tp):
                yield f"--tp {tp} --pp {pp}", grown, factor


def _try(step: _Step, change: _Change) -> Training | None:
    """Return the step with a change; None if the model does not fit the layout."""
    try:
        return step.measure(change.layout, change.job)
    except MegapgError:
        return None


def _uneven(step: _Step) -> Iterator[Finding]:
    full, over = step.training.fullest, _over(step.training)
    if over <= _UNEVEN or full.total <= _FULL * step.limit:
        return
    what = f"uneven stages: a rank of stage {full.stage} holds {over - 1:.0%} more than the mean."
    cure = (
        f"Give stage {full.stage} fewer layers, with pipeline_model_parallel_layout of "
        "TransformerConfig in a model of your own."
    )
    job = step.training.job
    if job.recompute != "full":
        full_recompute = _Change("", step.layout, replace(job, recompute="full"), 0)
        tried = _try(step, full_recompute)
        if tried and _over(tried) <= _UNEVEN:
            cure = (
                f"--recompute full: the fullest stage then holds {_over(tried) - 1:.0%} more than "
                f"the mean. It takes time, so keep your setting if stage {full.stage} fits."
            )
    yield Finding("uneven-stages", what, cure)


def _over(training: Training) -> float:
    """Return the bytes of the fullest stage by those of the mean."""
    totals = [stage.total for stage in training.stages]
    return max(totals) * len(totals) / sum(totals)


def _communicators(training: Training) -> Iterator[Finding]:
    stage = max(training.stages, key=lambda each: each.communicators[0] - each.gradients)
    least = stage.communicators[0]
    if least > stage.gradients:
        what = (
            f"NCCL communicators of stage {stage.stage} take at least {text_of_bytes(least)}, and "
            f"its gradients {text_of_bytes(stage.gradients)}."
        )
        cure = (
            'Fewer channels take less. Bound them with options={"dp_cp": '
            "CommunicatorOptions(max_ctas=8)} of megapg.session, and measure."
        )
        yield Finding("communicators-over-gradients", what, cure)
