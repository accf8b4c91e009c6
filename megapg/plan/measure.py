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
from megatron.core.transformer.moe import moe_utils

import megapg
from megapg.communicators.lanes import NCCL_LANES
from megapg.errors import PlanError
from megapg.layout import GroupName, ParallelLayout
from megapg.ownership.opening import fake_session
from megapg.plan.cluster import Cluster
from megapg.plan.models import Model
from megapg.plan.nccl import of_stages
from megapg.plan.pipeline import most_kept
from megapg.plan.stage import Measured, Shape, Stage
from megapg.plan.training import Flow, Job, StageCost, Training
from megapg.testing.cpu import megatron_on_cpu
from megapg.torch_private.weightless import weightless

_SEEDED: dict[str, GroupName] = {"tp": "tp", "ep": "ep", "etp": "expt_tp"}


def measure(
    layout: ParallelLayout,
    cluster: Cluster,
    model: Model,
    job: Job,
    say: Callable[[str], object] | None = None,
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
    pipeline = layout.members("pp", layout.ranks[0])
    memory = {
        stage: each.memory for each in of_stages(layout, pipeline[0]) for stage in each.stages
    }
    alike: dict[Shape, Measured] = {}
    weights, costs = 0, []
    with _quiet(), _restored(), megatron_on_cpu(), weightless():
        for stage, rank in enumerate(pipeline):
            if say is not None:
                say(f"stage {stage + 1} of {layout.pp}")
            found = _measured(layout, rank, model, job, alike)
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
def _quiet() -> Iterator[None]:
    """Silence Megatron-core, which warns of the CPU."""
    log = logging.getLogger("megatron")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore at the end what Megatron-core changes: random numbers, and variables it adds."""
    tracker, variables = get_cuda_rng_tracker(), set(os.environ)
    newer = getattr(moe_utils, "get_moe_metrics_tracker", None)  # Megatron-core 0.19
    losses = newer().metrics if newer else moe_utils.get_moe_layer_wise_logging_tracker()
    random, balancing = dict(vars(tracker)), dict(losses)
    losses.clear()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        vars(tracker).update(random)
        losses.clear()
        losses.update(balancing)
        for name in os.environ.keys() - variables:
            del os.environ[name]


def _measured(
    layout: ParallelLayout, rank: int, model: Model, job: Job, alike: dict[Shape, Measured]
) -> Measured:
    """Build the stage of a rank, and measure it unless there was one of its shape."""
    # As on NCCL, so that experts and replicas have a group each, also of equal ranks.
    with (
        fake_session(layout, rank, lanes=NCCL_LANES) as session,
        megapg.published(session.groups),
    ):
        ranks = {f"{name}_rank": session.groups.rank(f) for name, f in _SEEDED.items()}
        model_parallel_cuda_manual_seed(1, **ranks)
        try:
            stage = Stage(model, session.groups, job)
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
    flows = [
        Flow(field, collective, *sum, _crossing(cluster, rank, layout.members(field, rank)))
        for (field, collective), sum in sorted(sums.items())
    ]
    return (*flows, *_messages(layout, cluster, job, rank, found.boundary))


def _messages(
    layout: ParallelLayout, cluster: Cluster, job: Job, rank: int, size: int
) -> Iterator[Flow]:
    """Yield what a rank sends and receives between pipeline stages.

    Every chunk receives activations from the chunk before it and returns their gradients.
    """
    pipeline, vpp = layout.members("pp", rank), layout.vpp or 1
    stage = pipeline.index(rank)
    last = stage == layout.pp - 1
    before, after = pipeline[stage - 1], pipeline[(stage + 1) % layout.pp]
    peers = [before] * (vpp - (stage == 0)) + [after] * (vpp - last)
    if peers and layout.pp > 1:
        crossing = sum(_crossing(cluster, rank, (peer,)) for peer in peers) / len(peers)
        count = len(peers) * job.microbatches
        for collective in ("recv", "send"):
            yield Flow("pp", collective, count, count * size, crossing)


def _crossing(cluster: Cluster, rank: int, members: tuple[int, ...]) -> float:
    """Return the share of the other members that a rank reaches over the network only."""
    block = max(cluster.node_size, cluster.domain_size)
    others = [member for member in members if member != rank]
    return sum(member // block != rank // block for member in others) / max(1, len(others))
