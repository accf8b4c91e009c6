"""Ranks in a mixed-radix grid: find positions that share all coordinates but some.

:class:`megapg.layout.ParallelLayout` makes the groups of a layout of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Grid:
    """A mixed-radix factorisation of the positions 0..world-1; the first axis varies fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @cached_property
    def _digits(self) -> dict[str, tuple[int, int]]:
        strides = [math.prod(self.sizes[:i]) for i in range(len(self.sizes))]
        return {axis: (strides[i], self.sizes[i]) for i, axis in enumerate(self.axes)}

    def stride(self, axis: str) -> int:
        return self._digits[axis][0]

    def coordinate(self, axis: str, position: int) -> int:
        stride, size = self._digits[axis]
        return position // stride % size

    def through(self, position: int, spanned: Sequence[str]) -> Sequence[int]:
        """Return the positions that share with ``position`` every coordinate except ``spanned``."""
        first = position - sum(self._offset(axis, position) for axis in spanned)
        runs = self._runs(spanned)
        if len(runs) == 1:
            stride, size = runs[0]
            return range(first, first + stride * size, stride)
        # Insert the longest run as whole ranges, as single elements are slow for a large group.
        longest = max(range(len(runs)), key=lambda index: runs[index][1])
        stride, size = runs[longest]
        inner, outer = _sums(runs[:longest]), _sums(runs[longest + 1 :])
        block = len(inner) * size
        found = [0] * (block * len(outer))
        for n, far in enumerate(outer):
            for i, near in enumerate(inner):
                start = first + near + far
                slots = slice(n * block + i, (n + 1) * block, len(inner))
                found[slots] = range(start, start + stride * size, stride)
        return found

    def number(self, position: int, spanned: Sequence[str]) -> int:
        """Return the place of a position's group among the groups over ``spanned``."""
        place, groups = 0, 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if axis not in spanned:
                place += self.coordinate(axis, position) * groups
                groups *= size
        return place

    def _runs(self, spanned: Sequence[str]) -> list[tuple[int, int]]:
        """Return (stride, size) of the spanned axes, with neighbouring axes merged.

        A group of the whole world is then one range.
        """
        runs = [(1, 1)]
        for axis in (axis for axis in self.axes if axis in spanned):
            stride, size = self._digits[axis]
            last_stride, last_size = runs[-1]
            if last_size == 1:
                runs[-1] = (stride, size)
            elif last_stride * last_size == stride:
                runs[-1] = (last_stride, last_size * size)
            elif size > 1:
                runs.append((stride, size))
        return runs

    def origins(self, spanned: Sequence[str]) -> Sequence[int]:
        """Return the lowest position of every group over ``spanned``, ascending."""
        return self.through(0, [axis for axis in self.axes if axis not in spanned])

    def _offset(self, axis: str, position: int) -> int:
        return self.coordinate(axis, position) * self.stride(axis)


def _sums(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return all sums of one multiple of each run's stride, the first run varying fastest."""
    sums = [0]
    for stride, size in runs:
        sums = [total + stride * n for n in range(size) for total in sums]
    return sums
