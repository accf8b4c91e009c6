"""Problems of a training step in a layout, each with a cure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megapg.errors import PlanError
from megapg.layout import ParallelLayout
from megapg.tools.plan.bars import text_of_bytes
from megapg.tools.plan.cluster import FULL, Cluster
from megapg.tools.plan.findings import Finding
from megapg.tools.plan.training import Job, Training

Measure = Callable[[Job], Training]

_UNEVEN = 1.2  # parameters of the fullest stage, by the mean of all


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
        measure: counts a step of another job in the layout.
        known: the problems that show without a model.
    """
    found = list(known)
    if layout.ep > 1 and not training.fields & {"ep", "tp_ep"}:
        found = [each for each in known if each.code != "ep-leaves-nvlink"]
        what = f"no group of ep communicates: {training.job.model} has no experts."
        found.append(Finding("no-experts", what, f"Leave out --ep {layout.ep}."))
    if training.fullest.total > FULL * cluster.memory_gb.value * 10**9:
        found.append(_little_memory(cluster, training, measure))
    return [*found, *_uneven(training), *_communicators(training)]


def _little_memory(cluster: Cluster, training: Training, measure: Measure) -> Finding:
    full, memory = training.fullest, cluster.memory_gb.value * 10**9
    is_out = full.total > memory
    what = (
        f"{'out of' if is_out else 'little'} memory: a rank of stage {full.stage} holds "
        f"{text_of_bytes(full.total)}, and a GPU has {cluster.memory_gb.value:g} GB."
    )
    limit, fits = (memory, "fits") if is_out else (FULL * memory, f"takes less than {FULL:.0%}")
    cure = "--suggest lists the layouts that fit, or the world size that may be enough."
    for options, job in _jobs(training.job):
        with contextlib.suppress(PlanError):  # a model of the user's may not recompute
            most = measure(job).fullest.total
            if most <= limit:
                cure = f"{options} {fits}. The fullest rank then holds {text_of_bytes(most)}."
                break
    if not is_out:
        what += " CUDA, kernels and fragments need memory, too."
    return Finding("out-of-memory" if is_out else "little-memory", what, cure)


def _jobs(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield jobs of less memory, with the options that ask for them."""
    other, also = replace(job, distributed_optimizer=True), ""
    if not job.distributed_optimizer:
        yield "A distributed optimizer", other
        also = " and a distributed optimizer"
    if job.recompute != "full":
        yield f"--recompute full{also}", replace(other, recompute="full")


def _uneven(training: Training) -> Iterator[Finding]:
    full = max(training.stages, key=lambda stage: stage.weights)
    over = full.weights * len(training.stages) / sum(each.weights for each in training.stages)
    if over > _UNEVEN:
        what = f"uneven stages: stage {full.stage} has {over - 1:.0%} more parameters than the"
        cure = (
            f"Give stage {full.stage} fewer layers, with pipeline_model_parallel_layout of "
            "TransformerConfig in a model of your own."
        )
        yield Finding("uneven-stages", f"{what} mean.", cure)


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
