"""Looks for the cause of a wrong tensor in its numbers, and claims no more than they show."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megapg.launch.process import ranks_said
from megapg.layout import Field
from megapg.tools.parity.cases import LayoutCase
from megapg.tools.parity.differences import Compared, Piece, largest


@dataclass(frozen=True)
class Cause:
    """A cause in words, and its axis; empty if the numbers point to none."""

    text: str
    axis: str = ""


def explain(found: Compared, case: LayoutCase, tolerance: float) -> Cause:
    """Find the cause that the wrong values of one parameter have in common."""
    looking = _Looking(found, case, tolerance)
    hypotheses = (looking.lost, looking.scaled, looking.apart, looking.elsewhere, looking.placed)
    cause = next((each for each in (look() for look in hypotheses) if each), Cause(""))
    return cause if cause.axis else Cause(cause.text, only_axis(case))


def only_axis(case: LayoutCase) -> str:
    """Return the axis if the layout has only one."""
    return next(iter(case.sizes)) if len(case.sizes) == 1 else ""


def explain_number(value: float, wanted: float, case: LayoutCase) -> Cause:
    """Compare one wrong number with the sizes of the layout."""
    for axes, size in named_sizes(case.sizes):
        has = f"{axes} has {size} ranks"
        if math.isclose(value - wanted, math.log(size), rel_tol=1e-5):
            return Cause(f"larger by log({size}), and {has}", axes)
        if wanted and math.isclose(value / wanted, size, rel_tol=1e-5):
            return Cause(f"{size} times as large, and {has}", axes)
        if wanted and math.isclose(value / wanted, 1 / size, rel_tol=1e-5):
            return Cause(f"1/{size} as large, and {has}", axes)
    return Cause("", only_axis(case))


def named_sizes(sizes: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield axes with their number of ranks, alone and in pairs. Equal sizes share a name."""
    for number in sorted({*sizes.values()} - {1}):
        yield " or ".join(axis for axis in sizes if sizes[axis] == number), number
    for one, other in itertools.combinations(sizes, 2):
        yield f"{one} and {other}", sizes[one] * sizes[other]


class _Looking:
    """The hypotheses about one parameter, in the order in which they are tried."""

    def __init__(self, found: Compared, case: LayoutCase, tolerance: float) -> None:
        self._case, self._expert = case, found.expert
        self._pieces, self._missing = found.pieces, found.missing
        self._limit = max(tolerance, min(1e-6, found.off * 1e-3)) * found.scale
        self._wrong = found.wrong(tolerance)
        self._axes = case.axes(expert=found.expert)
        self._boxes: dict[object, list[Piece]] = defaultdict(list)
        for piece in found.pieces:
            self._boxes[piece.box].append(piece)

    def lost(self) -> Cause | None:
        """Elements are held by no rank."""
        if not self._missing:
            return None
        return Cause(f"no rank holds {self._missing} of its elements")

    def scaled(self) -> Cause | None:
        """One factor on all ranks."""
        factors = [self._factor(piece) for piece in self._pieces if largest(piece.wanted)]
        known = [factor for factor in factors if factor is not None]
        if len(known) < len(factors) or not known or max(known) - min(known) > 1e-4:
            return None
        factor = known[0]
        if abs(factor) < 1e-4:
            return Cause("zero on all ranks")
        if abs(factor - 1) < 1e-3:
            return None
        sizes: dict[str, int] = {axis: len(self._group(axis, 0)) for axis in self._axes}
        times = f"{factor:.4g} times the reference on all ranks"
        for axes, size in named_sizes(sizes):
            if math.isclose(factor, size, rel_tol=1e-4):
                return Cause(f"{times}: as if summed over {axes} once too often", axes)
            if math.isclose(factor, 1 / size, rel_tol=1e-4):
                return Cause(f"{times}: as if divided by the size of {axes} once too often", axes)
        return Cause(times)

    def apart(self) -> Cause | None:
        """Ranks that should hold the same values hold different ones."""
        unlike = [box for box in self._boxes.values() if self._differ(box)]
        if not unlike:
            return None
        axes = [axis for axis in self._axes if any(self._along(box, axis) for box in unlike)]
        for axis in axes:
            ranks = self._pair(unlike, axis)
            held = f"{ranks} of a {axis} group hold different values of what they share"
            if self._combine(axis, torch.Tensor.sum):
                return Cause(f"{held}; their sum is the reference: not summed over {axis}", axis)
            if self._combine(axis, torch.Tensor.mean):
                return Cause(f"{held}; their mean is the reference: not averaged over {axis}", axis)
        if not axes:
            ranks = " and ".join(str(piece.rank) for piece in unlike[0][:2])
            return Cause(f"ranks {ranks} hold different values of what they share")
        names = " and ".join(axes)
        return Cause(
            f"{self._pair(unlike, axes[0])} of a {axes[0]} group hold different values of what "
            f"they share{self._right()}",
            names,
        )

    def elsewhere(self) -> Cause | None:
        """Each wrong shard belongs to another rank."""
        for axis in self._axes:
            origins = {}
            for piece in self._pieces:
                if piece.rank not in self._wrong:
                    continue
                group = self._group(axis, piece.rank)
                same = [p for p in self._pieces if p.rank in group and p.box[1] != piece.box[1]]
                origins[piece.rank] = next(
                    (p.rank for p in same if self._equal(piece.value, p.wanted)), None
                )
            if origins and None not in origins.values():
                rank, other = next(iter(origins.items()))
                return Cause(f"rank {rank} holds what belongs to rank {other} of {axis}", axis)
        return None

    def placed(self) -> Cause | None:
        """The wrong ranks have one place on an axis."""
        holders = {piece.rank for piece in self._pieces}
        for axis in self._axes:
            places = {self._group(axis, rank).index(rank) for rank in self._wrong}
            there = {r for r in holders if self._group(axis, r).index(r) in places}
            if there == {*self._wrong} != holders:
                which = ", ".join(map(str, sorted(places)))
                return Cause(
                    f"wrong on the ranks at place {which} of {axis}, right elsewhere", axis
                )
        return None

    def _factor(self, piece: Piece) -> float | None:
        """The factor between a rank's values and the reference, if there is one."""
        square = float((piece.wanted * piece.wanted).sum())
        factor = float((piece.value * piece.wanted).sum()) / square
        return factor if self._equal(piece.value, factor * piece.wanted) else None

    def _equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return one.shape == other.shape and largest(one - other) <= self._limit

    def _differ(self, box: Sequence[Piece]) -> bool:
        return any(not self._equal(piece.value, box[0].value) for piece in box[1:])

    def _group(self, axis: Field, rank: int) -> tuple[int, ...]:
        return self._case.layout.members(axis, rank)

    def _along(self, box: Sequence[Piece], axis: Field) -> list[tuple[int, int]]:
        """Pairs of ranks of one group of the axis that hold different values."""
        values = {piece.rank: piece.value for piece in box}
        return [
            (rank, other)
            for rank in values
            for other in self._group(axis, rank)
            if rank < other and other in values and not self._equal(values[rank], values[other])
        ]

    def _pair(self, boxes: Sequence[Sequence[Piece]], axis: Field) -> str:
        rank, other = next(pair for box in boxes for pair in self._along(box, axis))
        return f"ranks {rank} and {other}"

    def _combine(self, axis: Field, how: Callable[..., torch.Tensor]) -> bool:
        """True if the values of each group of the axis, put together, are the reference."""
        for box in self._boxes.values():
            values: Mapping[int, torch.Tensor] = {piece.rank: piece.value for piece in box}
            for piece in box:
                members = [values[each] for each in self._group(axis, piece.rank) if each in values]
                if not self._equal(how(torch.stack(members), 0), piece.wanted):
                    return False
        return True

    def _right(self) -> str:
        holders = sorted({piece.rank for piece in self._pieces} - {*self._wrong})
        if not holders:
            return ""
        return f"; those of {ranks_said(holders)} are the reference's"
