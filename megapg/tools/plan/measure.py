"""Measure a training step: build the model of every pipeline stage without weights, and count.

The model, its optimizer and its collectives are Megatron-core's own. Only the messages between
pipeline stages are computed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import cast

import torch
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

import megapg
from megapg.collection import ProcessGroupCollection
from megapg.communicators.lanes import NCCL_LANES
from megapg.errors import PlanError
from megapg.layout import GroupName, ParallelLayout
from megapg.megatron.core import losses_of_experts
from megapg.ownership.opening import fake_session
from megapg.testing.cpu import megatron_on_cpu
from megapg.tools.plan.cluster import Cluster
from megapg.tools.plan.models import Model
from megapg.tools.plan.nccl import of_stages
from megapg.tools.plan.pipeline import most_kept
from megapg.tools.plan.repeats import Known
from megapg.tools.plan.spans import over_network
from megapg.tools.plan.stage import Measured, Shape, Stage
from megapg.tools.plan.training import Flow, Job, StageCost, Training
from megapg.torch_private.weightless import weightless

_SEEDED: dict[str, GroupName] = {"tp": "tp", "ep": "ep", "etp": "expt_tp"}


def measure(
    layout: ParallelLayout,
    cluster: Cluster,
    model: Model,
    job: Job,
    say: Callable[[str], object] | None = None,
    rank: int | None = None,
    known: Known | None = None,
) -> Training:
    """Return the memory and the traffic of one training step.

    Stages of equal shape are measured once. This process plays their ranks, so
    ``torch.distributed`` must not be initialised.

    Args:
        layout: the layout.
        cluster: its machines.
        model: the model.
        job: what is trained.
        say: called with a line of text before each stage.
        rank: a rank of the pipeline to measure. Default: the lowest.
        known: the microbatches of the model that were run for other layouts.

    Raises:
        PlanError: the model can't be built or trained in this layout.
        SessionError: torch.distributed is initialised in this process.
    """
    if layout.vpp and job.microbatches % layout.pp:
        more = -(-job.microbatches // layout.pp) * layout.pp
        raise PlanError(
            f"{job.microbatches} microbatches: Megatron-core interleaves virtual pipeline stages "
            f"only with a multiple of pp={layout.pp}. Plan with --microbatches {more}."
        )
    pipeline = layout.members("pp", layout.ranks[0] if rank is None else rank)
    memory = {
        stage: each.memory for each in of_stages(layout, pipeline[0]) for stage in each.stages
    }
    known = known or Known()
    alike: dict[Shape, Measured] = {}
    weights, costs = 0, []
    with weightless_on_cpu():
        for stage, rank in enumerate(pipeline):
            if say is not None:
                say(f"stage {stage + 1} of {layout.pp}")
            found = _measured(layout, rank, model, job, alike, known)
            weights += found.of_stage
            costs.append(
                StageCost(
                    stage=stage,
                    rank=rank,
                    weights=found.weights,
                    parameters=found.parameters,
                    gradients=found.gradients,
                    optimizer=found.optimizer,
                    activations=most_kept(layout, stage, job.microbatches, found.kept, found.peaks),
                    communicators=memory[stage],
                    flows=_flows(layout, cluster, job, rank, found),
                )
            )
    return Training(job, weights, tuple(costs))


@contextlib.contextmanager
def weightless_on_cpu() -> Iterator[None]:
    """Build models without weights. Megatron-core, which warns of the CPU, is silent."""
    log = logging.getLogger("megatron")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), _restored(), megatron_on_cpu(), weightless():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def as_rank(layout: ParallelLayout, rank: int) -> Iterator[ProcessGroupCollection]:
    """Play a rank, with published groups and seeded generators; yield its groups."""
    # As on NCCL, so that experts and replicas have a group each, also of equal ranks.
    with (
        fake_session(layout, rank, lanes=NCCL_LANES) as session,
        megapg.published(session.groups),
    ):
        ranks = {f"{name}_rank": session.groups.rank(f) for name, f in _SEEDED.items()}
        model_parallel_cuda_manual_seed(1, **ranks)
        yield session.groups


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore at the end what Megatron-core changes in this process.

    It changes random numbers, adds variables to the environment, and records losses of experts. The
    record has as many layers as the first model.
    """
    tracker, variables = get_cuda_rng_tracker(), set(os.environ)
    random, recorded = dict(vars(tracker)), losses_of_experts()
    losses = dict(recorded)
    recorded.clear()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        vars(tracker).update(random)
        for name in os.environ.keys() - variables:
            del os.environ[name]
        recorded.clear()
        recorded.update(losses)


def _measured(
    layout: ParallelLayout,
    rank: int,
    model: Model,
    job: Job,
    alike: dict[Shape, Measured],
    known: Known,
) -> Measured:
    """Build the stage of a rank, and measure it unless there was one of its shape."""
    with as_rank(layout, rank) as pg:
        try:
            stage = Stage(model, pg, job, known)
            if stage.shape not in alike:
                alike[stage.shape] = stage.measure()
        except PlanError:
            raise
        except Exception as error:
            words = f"a step of rank {rank} failed: {type(error).__name__}: {error}"
            raise PlanError(f"--model {model.name}: {words}") from error
        return alike[stage.shape]


def _flows(
    layout: ParallelLayout, cluster: Cluster, job: Job, rank: int, found: Measured
) -> tuple[Flow, ...]:
    """Return the traffic of a step, with the messages between stages.

    Groups of one rank send nothing. Groups that are not the session's have no field, and are left
    out.
    """
    sums: dict[tuple[GroupName, str], tuple[int, int]] = {}
    times = [*((rows, job.microbatches) for rows in found.microbatch), (found.step, 1)]
    for rows, repeated in times:
        for row in rows:
            if row.size > 1 and row.fields:
                key = cast("GroupName", row.field), row.collective
                count, size = sums.get(key, (0, 0))
                sums[key] = count + row.count * repeated, size + row.bytes * repeated
    messages = _messages(layout, job, rank, found.boundary)
    stage = layout.members("pp", rank).index(rank)
    return tuple(
        Flow(field, collective, *sum, over_network(layout, cluster, collective, group, stage))
        for (field, collective), sum in (*sorted(sums.items()), *messages)
        for group in (layout.members(field, rank),)
    )


def _messages(
    layout: ParallelLayout, job: Job, rank: int, size: int
) -> Iterator[tuple[tuple[GroupName, str], tuple[int, int]]]:
    """Yield the count and the bytes of the messages of a rank between pipeline stages.

    Every chunk receives activations from the chunk before it and returns their gradients.
    """
    ends = rank in layout.members("pp", rank)[:: max(1, layout.pp - 1)]
    count = (2 * (layout.vpp or 1) - ends) * job.microbatches
    if layout.pp > 1:
        yield ("pp", "recv"), (count, count * size)
        yield ("pp", "send"), (count, count * size)
