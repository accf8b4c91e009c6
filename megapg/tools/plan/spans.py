"""How far the groups of each field reach: their size, their number, and the nodes they cross."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megapg.layout import GroupName, ParallelLayout
from megapg.tools.plan.cluster import Cluster

Link = Literal["none", "NVLink", "node", "network"]


@dataclass(frozen=True)
class Span:
    """The groups of one field.

    Attributes:
        field: its name.
        size: number of ranks of the largest group.
        count: number of groups.
        nodes: fewest and most nodes that a group is on.
        domains: fewest and most NVLink domains that a group is on.
        link: the slowest link in a group: ``NVLink``, ``network``, ``node`` (inside a node, but not
            over NVLink), or ``none`` if each group is a single rank.
        ranks: the global ranks of the group of the plan's rank; empty if it is in none.
    """

    field: GroupName
    size: int
    count: int
    nodes: tuple[int, int]
    domains: tuple[int, int]
    link: Link
    ranks: tuple[int, ...]


def span_of(layout: ParallelLayout, cluster: Cluster, field: GroupName, rank: int) -> Span:
    """Return the reach of a field's groups. Costs no more than one group of each kind."""
    nodes = crossed(layout, field, cluster.node_size)
    domains = crossed(layout, field, cluster.domain_size)
    size = max(map(len, kinds_of(layout, field, 1)))
    link: Link = "network" if nodes[1] > 1 else "node"
    if domains[1] == 1:
        link = "NVLink" if size > 1 else "none"
    ranks = layout.members(field, rank)
    return Span(field, size, len(layout.first_ranks(field)), nodes, domains, link, ranks)


def crossed(layout: ParallelLayout, field: GroupName, block: int) -> tuple[int, int]:
    """Return the fewest and most blocks of ``block`` neighbouring ranks that a group is on."""
    found = [len({rank // block for rank in group}) for group in kinds_of(layout, field, block)]
    return min(found), max(found)


def kinds_of(layout: ParallelLayout, field: GroupName, block: int) -> Iterable[tuple[int, ...]]:
    """Yield groups so that every group lies in blocks like one of them."""
    if layout.ranks != range(layout.world_size) or not layout.is_regular(field):
        return layout.partition(field)
    # All groups have the same shape. Where a group starts in its block decides which it crosses.
    starts = {first % block: first for first in layout.first_ranks(field)}
    return (layout.members(field, first) for first in starts.values())


def over_network(
    layout: ParallelLayout, cluster: Cluster, collective: str, group: Sequence[int], stage: int
) -> float:
    """Return the share of bytes that leaves NVLink and the node.

    It is that of a ring's steps or of all pairs of ranks. Of messages between pipeline stages, it
    is that of the stage's own neighbours.
    """
    block = max(cluster.node_size, cluster.domain_size)
    blocks = [rank // block for rank in group]
    if collective == "all_to_all":
        inside = sum(count * (count - 1) for count in Counter(blocks).values())
        return 1 - inside / max(1, len(group) * (len(group) - 1))
    crossed = [a != b for a, b in itertools.pairwise([*blocks, blocks[0]])]
    if collective in ("recv", "send"):
        chunks = layout.vpp or 1
        before, after = chunks - (stage == 0), chunks - (stage == layout.pp - 1)
        return (before * crossed[stage - 1] + after * crossed[stage]) / (before + after)
    return sum(crossed) / len(group)


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return ranks as runs ``(first, last, step)``."""
    runs: list[tuple[int, int, int]] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end == at + 2 < len(ranks) and step != 1:  # two of several ranks are no run
            end, step = at + 1, 1
        runs.append((ranks[at], ranks[end - 1], step))
        at = end
    return runs


def text_of_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for people: ``0-7``, ``0, 8, ... 56`` or ``0-1, 8-9, ...``."""
    runs = runs_of(ranks)
    return ", ".join(_text_of_run(*run) for run in runs[:2]) + (", ..." if len(runs) > 2 else "")


def _text_of_run(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    if step == 1:
        return f"{first}-{last}"
    run = range(first, last + step // abs(step), step)
    return ", ".join(map(str, run)) if len(run) < 4 else f"{first}, {first + step}, ... {last}"
