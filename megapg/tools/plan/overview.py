"""A plan: all that is known of a layout on a cluster before there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import megapg
from megapg.communicators.needed import Communicator
from megapg.errors import PlanError
from megapg.layout import GroupName, ParallelLayout
from megapg.tools.plan.bars import Memory, memory_of, text_of_bytes
from megapg.tools.plan.cluster import Cluster, load_cluster
from megapg.tools.plan.cures import find_in_training
from megapg.tools.plan.findings import Finding, find
from megapg.tools.plan.models import NEEDS, find_model
from megapg.tools.plan.nccl import MEASURED, Stages, of_rank, of_stages
from megapg.tools.plan.picture import NODES, Picture, draw_picture
from megapg.tools.plan.spans import Span, runs_of, span_of
from megapg.tools.plan.svg import to_svg
from megapg.tools.plan.training import Flow, Job, Training

DEFAULT_CLUSTER = "H100-8"
TRAFFIC = ("field", "collective", "calls", "bytes", "over the network")
_SIZES = ("tp", "cp", "pp", "dp", "ep", "expt_tp", "expt_dp", "gtp_remat", "expt_gtp_remat")


@dataclass(frozen=True)
class Plan:
    """A layout on a cluster.

    Attributes:
        layout: the layout.
        cluster: the machines.
        rank: the rank whose groups and communicators are shown.
        spans: the groups of each field that a session makes.
        communicators: of the rank, as ``megapg.session(backend="nccl")`` makes them.
        stages: the number of communicators by pipeline stage.
        findings: problems, each with a cure.
        training: the memory and the traffic of a training step; None without a model.
    """

    layout: ParallelLayout
    cluster: Cluster
    rank: int
    spans: tuple[Span, ...]
    communicators: tuple[Communicator, ...]
    stages: tuple[Stages, ...]
    findings: tuple[Finding, ...]
    training: Training | None = None

    @property
    def memory(self) -> Memory | None:
        """The memory of each pipeline stage, for people; None without a model."""
        if self.training is None:
            return None
        return memory_of(self.layout, self.cluster, self.training)

    @property
    def flows(self) -> list[Flow]:
        """The traffic of the rank in one step, the most bytes first; empty without a model."""
        if self.training is None:
            return []
        stage = self.layout.members("pp", self.rank).index(self.rank)
        return sorted(self.training.stages[stage].flows, key=lambda flow: -flow.bytes)

    @property
    def traffic(self) -> list[tuple[str, ...]]:
        """The rows of ``TRAFFIC`` of the rank, and their total; empty if it has no traffic."""
        rows: list[tuple[str, ...]] = []
        flows = self.flows
        for flow in flows:
            size, share = text_of_bytes(flow.bytes), f"{flow.crossing:.0%}"
            rows.append((flow.field, flow.collective, f"{flow.count:,}", size, share))
        if total := sum(flow.bytes for flow in flows):
            share = f"{sum(flow.bytes * flow.crossing for flow in flows) / total:.0%}"
            rows.append(("total", "", "", text_of_bytes(total), share))
        return rows

    def picture(
        self, fields: Sequence[GroupName] = (), rank: int | None = None, nodes: int = NODES
    ) -> Picture:
        """Return the grid of ranks. See :func:`megapg.tools.plan.picture.draw_picture`."""
        return draw_picture(self.layout, self.cluster, fields=fields, rank=rank, nodes=nodes)

    def as_json(self, picture: Picture | None = None) -> dict[str, Any]:
        """Return plain data with this grid, as described by ``schema.json`` in this package."""
        cluster, sizes = self.cluster, self.layout
        picture = picture or self.picture()
        return {
            "schema_version": 1,
            "megapg": megapg.__version__,
            "layout": {
                "world_size": sizes.world_size,
                **{name: getattr(sizes, name) for name in _SIZES},
                "vpp": sizes.vpp,
                "order": sizes.order,
            },
            "cluster": {
                "name": cluster.name,
                "nodes": cluster.nodes or picture.nodes,
                **{name: asdict(each) for name, each in cluster.quantities.items()},
            },
            "rank": self.rank,
            "fields": [
                asdict(each) | {"ranks": {"count": len(each.ranks), "runs": runs_of(each.ranks)}}
                for each in self.spans
            ],
            "communicators": {
                "of_rank": [
                    {"fields": each.fields, "size": len(each.ranks)} for each in self.communicators
                ],
                "by_stage": [asdict(each) | {"memory": each.memory} for each in self.stages],
                "measured": [asdict(each) for each in MEASURED],
            },
            "grid": picture.as_json(),
            "training": self.training and _as_json(self.training),
            "findings": [asdict(each) for each in self.findings],
        }


def _as_json(training: Training) -> dict[str, Any]:
    from megapg.megatron.core import version_text  # imports torch, which such a plan needs anyway

    totals = [each.total for each in training.stages]
    stages = zip(asdict(training)["stages"], totals, strict=True)
    return {
        "megatron_core": version_text(),
        "job": asdict(training.job),
        "weights": training.weights,
        "stages": [stage | {"total": total} for stage, total in stages],
        "fullest": training.fullest.stage,
    }


def make_plan(
    layout: ParallelLayout,
    cluster: Cluster | str = DEFAULT_CLUSTER,
    *,
    rank: int | None = None,
    job: Job | None = None,
    say: Callable[[str], object] | None = None,
) -> Plan:
    """Return the plan of a layout. Needs no GPU, and torch and Megatron-core only for a job.

    Args:
        layout: the layout.
        cluster: a cluster, or its name or file as in ``megapg plan --cluster``.
        rank: the rank whose groups are shown. Default: the lowest.
        job: also count the memory and the traffic of a step of this job.
        say: called with a line of text before each stage is counted.

    Raises:
        PlanError: the cluster or the model does not exist, or the layout does not fit them. Or the
            rank is not in the layout.
    """
    if isinstance(cluster, str):
        cluster = load_cluster(cluster)
    needed = max(layout.ranks) // cluster.node_size + 1
    if cluster.nodes is not None and cluster.nodes < needed:
        raise PlanError(
            f"{cluster.nodes} nodes of {cluster.name} have {cluster.nodes * cluster.node_size} "
            f"GPUs, but the layout has {layout.world_size} ranks. Use {needed}x{cluster.name}."
        )
    rank = min(layout.ranks) if rank is None else rank
    if rank not in layout.ranks:
        raise PlanError(f"rank {rank} is not in the layout, which has {layout.world_size} ranks.")
    training = None
    findings = find(layout, cluster)
    if job is not None:
        measure = _measure(layout, cluster, job, say, rank)
        training = measure(job)
        findings = find_in_training(layout, cluster, training, measure, findings)
    made = of_rank(layout, rank)
    fields = [field for field in layout.families if field not in ("dp_cp_ag", "expt_dp_ag")]
    return Plan(
        layout,
        cluster,
        rank,
        tuple(span_of(layout, cluster, field, rank) for field in fields),
        tuple(made),
        tuple(of_stages(layout, rank)),
        tuple(findings),
        training,
    )


def _measure(
    layout: ParallelLayout,
    cluster: Cluster,
    job: Job,
    say: Callable[[str], object] | None,
    rank: int,
) -> Callable[[Job], Training]:
    """Return a function that counts a step of a job of the same model."""
    try:
        from megapg.tools.plan.measure import measure
    except ImportError as error:
        raise PlanError(f"{error}. {NEEDS}") from error
    model = find_model(job.model)
    return lambda job: measure(layout, cluster, model, job, say, rank)


def draw_svg(
    layout: ParallelLayout,
    cluster: str = DEFAULT_CLUSTER,
    *,
    fields: Sequence[GroupName] = (),
    rank: int | None = None,
) -> str:
    """Return the grid of nodes by local ranks as SVG, coloured by group.

    Args:
        layout: the layout.
        cluster: the machines, as in ``megapg plan --cluster``.
        fields: the fields to draw. Default: tp, cp, pp, dp and ep, if larger than 1.
        rank: light up the groups of this rank.

    Raises:
        PlanError: there is no such cluster, or the rank is not in the layout.
        UnknownFieldError: the layout does not have a field.
    """
    return to_svg(draw_picture(layout, load_cluster(cluster), fields=fields, rank=rank))
