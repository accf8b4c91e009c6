"""Problems of a layout on a cluster, each with a cure that was tried on the layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megapg.errors import LayoutError
from megapg.layout import AXES, GroupName, ParallelLayout
from megapg.plan.cluster import Cluster
from megapg.plan.spans import crossed


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
    if _inside(layout, cluster, "tp"):
        return
    where = _where(layout, cluster, "tp")
    for order in _orders(layout):
        if (other := _changed(layout, order=order)) and _inside(other, cluster, "tp"):
            cure = f"--order {order} keeps the groups of tp inside {_domain(cluster)}."
            break
    else:
        cure = _smaller_tp(layout, cluster)
    what = (
        f"tensor parallelism crosses the network: a group of tp has {layout.tp} ranks on {where}, "
        "and communicates in every layer."
    )
    yield Finding("tp-crosses-nodes", what, cure)


def _smaller_tp(layout: ParallelLayout, cluster: Cluster) -> str:
    """Return the largest tp that stays inside, with pp grown by the same factor if that fits."""
    for tp in range(min(layout.tp - 1, cluster.domain_size), 0, -1):
        factor, rest = divmod(layout.tp, tp)
        expt_tp = tp if layout.expt_tp == layout.tp else layout.expt_tp
        sizes = {"tp": tp, "expt_tp": expt_tp}
        grown = _changed(layout, **sizes, pp=layout.pp * factor) if not rest else None
        other = grown or _changed(layout, **sizes)
        if other and _inside(other, cluster, "tp"):
            pipeline = f" --pp {other.pp}" if grown else ""
            return f"--tp {tp}{pipeline} keeps the groups of tp inside {_domain(cluster)}."
    return f"No smaller tp fits this layout and keeps its groups inside {_domain(cluster)}."


def _experts(layout: ParallelLayout, cluster: Cluster) -> Iterator[Finding]:
    if layout.ep == 1 or _inside(layout, cluster, "ep"):
        return
    what = (
        f"experts cross the network: a group of ep has {layout.ep} ranks on "
        f"{_where(layout, cluster, 'ep')}, and exchanges tokens in every layer of experts."
    )
    for order in _orders(layout):
        other = _changed(layout, order=order)
        if other and all(_inside(other, cluster, field) for field in ("ep", "tp", "expt_tp")):
            cure = f"--order {order} keeps the groups of ep and tp inside {_domain(cluster)}."
            yield Finding("ep-crosses-nodes", what, cure)
            return
    whole = _changed(layout, expt_tp=1) if layout.expt_tp > 1 else None
    if whole and _inside(whole, cluster, "ep"):
        cure = (
            f"--expt-tp 1 keeps the groups of ep inside {_domain(cluster)}. A rank then holds "
            f"{layout.expt_tp} times the weights of experts."
        )
        yield Finding("ep-crosses-nodes", what, cure)


def _orders(layout: ParallelLayout) -> Iterator[str]:
    """Yield other orders of the axes, those nearest to the layout's first."""
    usual = [*dict.fromkeys([*layout.order.split("-"), *AXES])]
    for axes in itertools.permutations(axis for axis in usual if axis != "pp"):
        order = "-".join([*axes, "pp"])
        if order != layout.order:
            yield order


def _changed(layout: ParallelLayout, **changes: Any) -> ParallelLayout | None:
    try:
        return replace(layout, **changes)
    except LayoutError:
        return None


def _inside(layout: ParallelLayout, cluster: Cluster, field: GroupName) -> bool:
    return crossed(layout, field, cluster.domain_size)[1] == 1


def _where(layout: ParallelLayout, cluster: Cluster, field: GroupName) -> str:
    return f"{crossed(layout, field, cluster.domain_size)[1]} {_domain(cluster).partition(' ')[2]}s"


def _domain(cluster: Cluster) -> str:
    return "a node" if cluster.domain_size == cluster.node_size else "an NVLink domain"
