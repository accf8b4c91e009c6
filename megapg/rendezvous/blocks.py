"""Blocks of ranks for large jobs: with n ranks, no rank reads more than about sqrt(n) messages.

The first rank of a block is its *head*. It reads the messages of its block and reports them with
one key. The *leader*, the first rank of all, reads its own block and the reports. A report only
repeats keys that are in the store. Without the report, a rank can read the original keys, so a dead
or stuck head costs time only. Reports are not counted, so a message that is reported twice does no
harm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

# With more ranks than this, the leader reads one report per block.
FLAT = 1_024
# How long the leader waits for heads: the larger of so many seconds and one second for so many
# ranks, but at most half of the time left.
_HEAD_WAIT = 5.0
_RANKS_A_SECOND = 2_048


class Blocks:
    """Blocks whose size is the square root of the number of ranks. Few ranks are one block.

    Args:
        ranks: all ranks, in the same order on each.
        rank: this rank.
        flat: the most ranks that make a single block.
    """

    def __init__(self, ranks: Sequence[int], rank: int, flat: int) -> None:
        few = len(ranks) <= flat
        self._ranks = ranks
        self._size = len(ranks) if few else math.isqrt(len(ranks) - 1) + 1
        self.leaders: Sequence[int] = ranks[: self._size]
        """The block of the leader."""
        self.mine: Sequence[int] = ranks if few else self._around(rank)
        """The block of this rank."""
        self.several = not few
        self.head = self.mine[0]
        """The first rank of this rank's block."""
        self.heading = rank == self.head and rank != ranks[0]
        """True if this rank reports to the leader."""

    def _around(self, rank: int) -> Sequence[int]:
        guess = rank - self._ranks[0]  # fast path for consecutive ranks, which may be many
        known = 0 <= guess < len(self._ranks) and self._ranks[guess] == rank
        at = guess if known else self._ranks.index(rank)
        first = at - at % self._size
        return self._ranks[first : first + self._size]

    def reporting(self) -> list[Sequence[int]]:
        """Return the blocks whose heads report: all but the leader's."""
        starts = range(self._size, len(self._ranks), self._size)
        return [self._ranks[at : at + self._size] for at in starts]

    def late(self, deadline: float) -> float:
        """Return the time at which the leader stops waiting for heads, given its deadline."""
        now = time.monotonic()
        patience = max(_HEAD_WAIT, len(self._ranks) / _RANKS_A_SECOND)
        return now + min(patience, (deadline - now) / 2)


class Reports:
    """The blocks that have not reported to the leader, in order.

    Args:
        blocks: the blocks, on the leader.
        deadline: the leader's deadline.
    """

    def __init__(self, blocks: Blocks, deadline: float) -> None:
        self.missing = blocks.reporting()
        self._late = blocks.late(deadline)

    @property
    def late(self) -> bool:
        """True if the leader now reads blocks itself, one at a time."""
        return time.monotonic() >= self._late

    def awaited(self) -> list[int]:
        """Return the ranks that the leader waits for, as far as it knows."""
        heads = [block[0] for block in self.missing]
        return [*(self.missing[0] if self.missing and self.late else ()), *heads]

    def all_here(
        self,
        reported: Callable[[Sequence[Sequence[int]]], bool],
        said: Callable[[Sequence[int]], bool],
        *,
        hurry: bool = False,
    ) -> bool:
        """True if every block is complete.

        Args:
            reported: True if the heads of all these blocks have reported.
            said: True if all ranks of a block have written their keys. Called if its head is late.
            hurry: do not wait for heads.
        """
        if self.missing and reported(self.missing):
            self.missing.clear()
        while self.missing and (hurry or self.late):
            block = self.missing[0]
            if not reported([block]) and not said(block):
                break
            self.missing.pop(0)
        return not self.missing


def report_key(folder: str, block: Sequence[int]) -> str:
    """Return the key in a folder under which the head of a block reports."""
    return f"{folder}/block of {block[0]}"
