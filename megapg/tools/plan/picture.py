"""The grid of ranks as a value: nodes by local ranks, with the number of each rank's group.

Most nodes of a large job repeat others. ``folded`` chooses the nodes that are drawn: of each
repetition the first ones and the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megapg.errors import PlanError
from megapg.layout import GroupName, ParallelLayout
from megapg.tools.plan.cluster import Cluster
from megapg.tools.plan.spans import Span, span_of

USUAL: tuple[GroupName, ...] = ("tp", "cp", "pp", "dp", "ep", "expt_tp", "gtp_remat")
"""The fields of a picture, if their groups have more than one rank."""

NODES = 12
"""The number of nodes that are drawn, about."""

_ROW = 8  # nodes in a row


@dataclass(frozen=True)
class Panel:
    """The grid in the numbers of one field's groups.

    Attributes:
        fields: the fields whose groups these are; more than one if their ranks are equal.
        span: the size and reach of the groups.
        numbers: for each drawn node, the number of each local rank's group, or None.
        lit: the number of the group that is lit up, or None.
    """

    fields: tuple[GroupName, ...]
    span: Span
    numbers: dict[int, tuple[int | None, ...]]
    lit: int | None

    @property
    def name(self) -> str:
        """The fields, joined."""
        return ", ".join(self.fields)

    @property
    def caption(self) -> str:
        """The groups, and the link between their ranks."""
        span = self.span
        groups = f"{span.count:,} group{'s' * (span.count > 1)} of {span.size:,}"
        least, most = span.nodes
        up_to = "up to " if least < most else ""
        where = {
            "none": "",
            "NVLink": "in a node" if most == 1 else f"NVLink, {up_to}{most} nodes",
            "node": "in a node, not all over NVLink",
            "network": f"across {up_to}{most:,} nodes",
        }[span.link]
        return ", ".join(filter(None, (groups, where)))


@dataclass(frozen=True)
class Picture:
    """The grid of nodes by local ranks, with a panel for each field.

    Attributes:
        title: the sizes and the machines.
        rows: the drawn nodes. A row of the picture has nodes that differ in one digit only.
        nodes: number of all nodes.
        ranks: for each drawn node, its global ranks; None for a GPU without a rank.
        panels: one grid for each field, or for several fields with the same groups.
        rank: the rank whose groups are lit up, or None.
        repeats: True if the nodes that are not drawn repeat those that are.
    """

    title: str
    rows: tuple[tuple[int, ...], ...]
    nodes: int
    ranks: dict[int, tuple[int | None, ...]]
    panels: tuple[Panel, ...]
    rank: int | None
    repeats: bool

    @property
    def note(self) -> str:
        """The number of nodes that are not drawn; empty if all are."""
        hidden = self.nodes - sum(map(len, self.rows))
        if not hidden:
            return ""
        others = "The others repeat them." if self.repeats else "The others do not repeat them."
        return f"{self.nodes - hidden} of {self.nodes:,} nodes are drawn. {others}"

    def gaps(self) -> Iterator[tuple[int, int, bool]]:
        """Yield each drawn node, the number of hidden ones before it, and if it starts a row."""
        last = -1
        for row in self.rows:
            for place, node in enumerate(row):
                yield node, node - last - 1, place == 0
                last = node

    def as_json(self) -> dict[str, Any]:
        """Return plain data for the plan's JSON."""
        return {
            "nodes": self.nodes,
            "drawn": [{"node": node, "ranks": ranks} for node, ranks in self.ranks.items()],
            "groups": {
                field: [*panel.numbers.values()] for panel in self.panels for field in panel.fields
            },
        }


def draw_picture(
    layout: ParallelLayout,
    cluster: Cluster,
    *,
    fields: Sequence[GroupName] = (),
    rank: int | None = None,
    nodes: int = NODES,
) -> Picture:
    """Return the picture of a layout.

    Args:
        layout: the layout.
        cluster: the machines.
        fields: the fields to draw. Default: those of ``USUAL``.
        rank: light up the groups of this rank.
        nodes: draw about as many nodes; repetitions of others are folded.

    Raises:
        UnknownFieldError: the layout has no such field.
        PlanError: the rank is not in the layout.
    """
    if rank is not None and rank not in layout.ranks:
        raise PlanError(f"rank {rank} is not in the layout, which has {layout.world_size} ranks.")
    named = {field: (field,) for field in fields} or usual_fields(layout)
    drawn = tuple(named)
    number = {field: _numbering(layout, field) for field in drawn}
    size = cluster.node_size
    present = layout.ranks if isinstance(layout.ranks, range) else frozenset(layout.ranks)

    def ranks_at(node: int) -> tuple[int | None, ...]:
        return tuple(r if r in present else None for r in range(node * size, (node + 1) * size))

    def numbers_at(field: GroupName, node: int) -> tuple[int | None, ...]:
        return tuple(None if r is None else number[field](r) for r in ranks_at(node))

    count = max(layout.ranks) // size + 1
    loops = None
    if all(layout.is_regular(field) for field in drawn):
        loops = _loops(layout, size, lambda node: [numbers_at(field, node) for field in drawn])
    rows = folded(loops, count, nodes, None if rank is None else rank // size)
    shown = [node for row in rows for node in row]
    lit = rank if rank is not None else min(layout.ranks)
    panels = [
        Panel(
            named[field],
            span_of(layout, cluster, field, lit),
            {node: numbers_at(field, node) for node in shown},
            None if rank is None else number[field](rank),
        )
        for field in drawn
    ]
    cells = {node: ranks_at(node) for node in shown}
    title = title_of(layout, cluster)
    return Picture(title, rows, count, cells, tuple(panels), rank, loops is not None)


def usual_fields(layout: ParallelLayout) -> dict[GroupName, tuple[GroupName, ...]]:
    """Return the fields that a picture has by default, each with those of the same groups."""
    first = min(layout.ranks)
    alike: dict[tuple[int, ...], tuple[GroupName, ...]] = {}
    experts = layout.ep > 1 or layout.expt_tp != layout.tp
    for field in USUAL:
        if field == "expt_tp" and not experts:
            continue
        ranks = layout.members(field, first)
        if len(ranks) > 1:
            alike[ranks] = (*alike.get(ranks, ()), field)
    return {fields[0]: fields for fields in alike.values()} or {"tp": ("tp",)}


def title_of(layout: ParallelLayout, cluster: Cluster) -> str:
    """Return the sizes of a layout and its machines on one line."""
    named = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep")}
    sizes = " ".join(f"{name}={size}" for name, size in named.items() if size > 1)
    if layout.ep > 1:
        sizes += f" expt_tp={layout.expt_tp}"
    nodes = max(layout.ranks) // cluster.node_size + 1
    machines = f"{nodes:,} node{'s' * (nodes > 1)} of {cluster.name}"
    return f"{layout.world_size:,} ranks: {sizes or 'dp=1'}, on {machines}"


def _numbering(layout: ParallelLayout, field: GroupName) -> Callable[[int], int | None]:
    """Return a function from a rank to the number of its group."""
    if layout.is_regular(field):
        return lambda rank: layout.group_number(field, rank)
    groups = enumerate(layout.partition(field))
    return {rank: number for number, group in groups for rank in group}.get


# --- folds ----------------------------------------------------------------------------------------

# A number of repetitions, and the distance between two of them in nodes.
Loop = tuple[int, int]
# Maps a node to the numbers of its groups, in each field.
NumbersAt = Callable[[int], list[tuple[int | None, ...]]]


def _loops(layout: ParallelLayout, size: int, numbers_at: NumbersAt) -> list[Loop] | None:
    """Return how the nodes repeat, the fastest loop first. None if they do not repeat evenly."""
    blocks = sorted({*layout.block_sizes, size})
    even = all(larger % smaller == 0 for smaller, larger in itertools.pairwise(blocks))
    if layout.ranks != range(layout.world_size) or not even or size > layout.world_size:
        return None
    from_node = [each // size for each in blocks if each >= size]
    loops: list[Loop] = []
    for near, far in itertools.pairwise(from_node):
        last = loops[-1] if loops else None
        if last and _same_step(numbers_at, last, near):
            loops[-1] = (last[0] * (far // near), last[1])
        else:
            loops.append((far // near, near))
    return loops


def _same_step(numbers_at: NumbersAt, loop: Loop, next_step: int) -> bool:
    """True if the group numbers after the loop's end go on as within the loop."""
    times, step = loop
    first, second, after = numbers_at(0), numbers_at(step), numbers_at(next_step)
    return all(
        None not in (a, b, c) and c - a == times * (b - a)  # type: ignore[operator]
        for rows in zip(first, second, after, strict=True)
        for a, b, c in zip(*rows, strict=True)
    )


def folded(
    loops: list[Loop] | None, count: int, budget: int, kept: int | None
) -> tuple[tuple[int, ...], ...]:
    """Return the nodes to draw, in rows.

    Args:
        loops: the repetitions, the fastest first. None: draw the first nodes.
        count: number of nodes.
        budget: draw about as many nodes.
        kept: a node that must be drawn.
    """
    if loops is None:
        first = sorted({*range(min(count, budget)), *([] if kept is None else [kept])})
        return tuple(tuple(first[at : at + _ROW // 2]) for at in range(0, len(first), _ROW // 2))
    chosen: list[list[int]] = [[*range(times)] for times, _ in loops]
    always = [set() if kept is None else {kept // step % times} for times, step in loops]
    for ends in ((0, 1, -1), (0, -1), (0,)):
        for place in sorted(range(len(loops)), key=lambda n: -loops[n][0]):
            times = loops[place][0]
            if math.prod(map(len, chosen)) > budget and times > len(ends):
                chosen[place] = sorted({end % times for end in ends} | always[place])
    if not loops:
        return ((0,),)
    fastest, *slower = [
        [digit * step for digit in digits] for digits, (_, step) in zip(chosen, loops, strict=True)
    ]
    starts = sorted(map(sum, itertools.product(*slower)))
    return tuple(
        tuple(start + node for node in fastest[at : at + _ROW])
        for start in starts
        for at in range(0, len(fastest), _ROW)
    )
