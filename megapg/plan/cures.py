"""Problems of a training step in a layout, each with a cure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megapg.errors import PlanError
from megapg.layout import ParallelLayout
from megapg.plan.bars import text_of_bytes
from megapg.plan.cluster import Cluster
from megapg.plan.findings import Finding
from megapg.plan.training import Job, Training

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
    limit, most = cluster.memory_gb.value * 10**9, training.fullest.total
    if most > limit:
        found.append(_out_of_memory(cluster, training, measure))
    return [*found, *_uneven(training), *_communicators(training)]


def _out_of_memory(cluster: Cluster, training: Training, measure: Measure) -> Finding:
    full = training.fullest
    what = (
        f"out of memory: a rank of stage {full.stage} holds {text_of_bytes(full.total)}, and a GPU "
        f"has {cluster.memory_gb.value:g} GB."
    )
    cure = "--suggest lists the layouts that fit, or the world size that may be enough."
    for options, job in _jobs(training.job):
        with contextlib.suppress(PlanError):  # a model of the user's may not recompute
            most = measure(job).fullest.total
            if most <= cluster.memory_gb.value * 10**9:
                cure = f"{options} fits. The fullest rank then holds {text_of_bytes(most)}."
                break
    return Finding("out-of-memory", what, cure)


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
