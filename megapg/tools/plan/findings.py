"""Problems of a layout on a cluster, each with a cure that was tried on the layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megapg.errors import LayoutError
from megapg.layout import AXES, GroupName, ParallelLayout
from megapg.tools.plan.cluster import Cluster
from megapg.tools.plan.spans import crossed


@dataclass(frozen=True)
class Finding:
    """A problem, and what to do about it.

    Attributes:
        code: names the kind of problem, for programs.
        what: the problem.
        cure: what to change.
    """

    code: str
    what: str
    cure: str


def find(layout: ParallelLayout, cluster: Cluster) -> list[Finding]:
    """Return the problems that show without a model."""
    return [*_tensor_parallel(layout, cluster), *_experts(layout, cluster)]


def _tensor_parallel(layout: ParallelLayout, cluster: Cluster) -> Iterator[Finding]:
    if not _inside(layout, cluster, "tp"):
        what = f"tensor parallelism leaves NVLink: {_reach(layout, cluster, 'tp')} in every layer."
        cure = _other_order(layout, cluster, "tp") or _smaller_tp(layout, cluster)
        yield Finding("tp-leaves-nvlink", what, cure)


def _experts(layout: ParallelLayout, cluster: Cluster) -> Iterator[Finding]:
    if _inside(layout, cluster, "ep"):
        return
    what = f"experts leave NVLink: {_reach(layout, cluster, 'ep')} in every layer of experts."
    cure = _other_order(layout, cluster, "ep", "tp", "expt_tp")
    whole = _changed(layout, expt_tp=1) if layout.expt_tp > 1 else None
    if not cure and whole and _inside(whole, cluster, "ep"):
        cure = (
            f"--expt-tp 1 keeps the groups of ep inside {_domain(cluster)}. A rank then holds "
            f"{layout.expt_tp} times the weights of experts."
        )
    if cure:
        yield Finding("ep-leaves-nvlink", what, cure)


def _other_order(layout: ParallelLayout, cluster: Cluster, *fields: GroupName) -> str:
    """Return the cure by another order of the axes that keeps the fields inside, or nothing."""
    axes = dict.fromkeys([*layout.order.split("-"), *AXES])
    for others in itertools.permutations(axis for axis in axes if axis != "pp"):
        order = "-".join([*others, "pp"])
        other = _changed(layout, order=order)
        if other and all(_inside(other, cluster, field) for field in fields):
            kept = " and ".join(fields[:2])
            return f"--order {order} keeps the groups of {kept} inside {_domain(cluster)}."
    return ""


def _smaller_tp(layout: ParallelLayout, cluster: Cluster) -> str:
    """Return the largest tp that stays inside, with pp grown by the same factor if that fits."""
    for tp in range(min(layout.tp - 1, cluster.domain_size), 0, -1):
        factor, rest = divmod(layout.tp, tp)
        sizes = {"tp": tp, "expt_tp": tp if layout.expt_tp == layout.tp else layout.expt_tp}
        grown = _changed(layout, **sizes, pp=layout.pp * factor) if not rest else None
        other = grown or _changed(layout, **sizes)
        if other and _inside(other, cluster, "tp"):
            pipeline = f" --pp {other.pp}" if grown else ""
            return f"--tp {tp}{pipeline} keeps the groups of tp inside {_domain(cluster)}."
    return f"No smaller tp fits this layout and keeps its groups inside {_domain(cluster)}."


def _changed(layout: ParallelLayout, **changes: Any) -> ParallelLayout | None:
    """Return the layout with other sizes; None if they do not fit together."""
    try:
        return replace(layout, **changes)
    except LayoutError:
        return None


def _inside(layout: ParallelLayout, cluster: Cluster, field: GroupName) -> bool:
    return crossed(layout, field, cluster.domain_size)[1] == 1


def _reach(layout: ParallelLayout, cluster: Cluster, field: GroupName) -> str:
    size = len(layout.members(field, layout.ranks[0]))
    most = crossed(layout, field, cluster.domain_size)[1]
    domains = _domain(cluster).partition(" ")[2]
    return f"a group of {field} has {size} ranks on {most} {domains}s, and communicates"


def _domain(cluster: Cluster) -> str:
    return "a node" if cluster.domain_size == cluster.node_size else "an NVLink domain"
