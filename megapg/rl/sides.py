"""The sides of a joint group, and the names and hosts of their ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from typing_extensions import override

from megapg.errors import LayoutError
from megapg.rendezvous.error_texts import RankNames, first


class Sides(RankNames):
    """The sides of a group, and the ranks of each."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
            raise LayoutError(
                f"sizes={dict(sizes)}: give the number of ranks of each side, at least 1, as in "
                "{'trainer': 4, 'rollout': 2}."
            )
        self.sizes = dict(sizes)
        self.total = sum(self.sizes.values())

    def ranks(self, side: str) -> range:
        """Return the ranks of a side in the group."""
        if side not in self.sizes:
            raise LayoutError(f"there is no side {side!r}; the sides are {', '.join(self.sizes)}.")
        begin = sum(self.sizes[each] for each in takewhile(side.__ne__, self.sizes))
        return range(begin, begin + self.sizes[side])

    def rank(self, side: str, number: int) -> int:
        """Return the rank in the group."""
        ranks = self.ranks(side)
        if not 0 <= number < len(ranks):
            raise LayoutError(
                f"rank={number} is not within the {len(ranks)} ranks of side {side!r}."
            )
        return ranks[number]

    def member(self, rank: int) -> tuple[str, int]:
        """Return the side of a rank, and the rank in the side."""
        for side in self.sizes:
            if rank in self.ranks(side):
                return side, self.ranks(side).index(rank)
        raise LayoutError(f"there is no rank {rank} among {self.total} ranks.")

    def hosts(self, by_side: Mapping[str, Sequence[str]]) -> Sequence[str]:
        """Return rank -> host; empty where it is not known."""
        hosts = [""] * self.total
        for side, names in by_side.items():
            for rank, host in zip(self.ranks(side), names, strict=False):
                hosts[rank] = host
        return hosts

    @override
    def one(self, rank: int) -> str:
        if rank >= self.total:  # of a process with other sizes
            return super().one(rank)
        side, number = self.member(rank)
        return f"side {side!r} rank {number}"

    @override
    def several(self, ranks: Collection[int]) -> str:
        return first(map(self.one, ranks))

    @override
    def __str__(self) -> str:
        return ", ".join(f"{side} {size}" for side, size in self.sizes.items())
