"""Large jobs: the ranks in blocks, so that nobody hears more than the root of the world.

The first rank of a block, its *head*, hears what the block says and reports it with one key. The
leader, the first rank of all, hears its own block and the heads. A report only repeats what stands
in the store: whoever misses one reads the ranks' own words, and so a head that died, or is stuck,
costs time and no more. Nothing is counted: a word said twice is still one rank's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

# Up to how many ranks the leader hears each one by itself.
FLAT = 1_024
# For how long the leader leaves a block to its head: seconds, and how many ranks make it one more.
# Half of the time that it has at most.
_LATE = 5.0
_RANKS_A_SECOND = 2_048


class Blocks:
    """Ranks in blocks of the root of their number; few ranks are one block.

    Args:
        ranks: all of them, in the same order on each.
        rank: this one.
        flat: up to how many ranks are one block.
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
        """The first rank of it."""
        self.heading = rank == self.head and rank != ranks[0]
        """Whether this rank reports to the leader."""

    def _around(self, rank: int) -> Sequence[int]:
        guess = rank - self._ranks[0]  # ranks in a row are not searched: there may be very many
        known = 0 <= guess < len(self._ranks) and self._ranks[guess] == rank
        at = guess if known else self._ranks.index(rank)
        first = at - at % self._size
        return self._ranks[first : first + self._size]

    def reporting(self) -> list[Sequence[int]]:
        """The blocks whose heads report: all but the leader's."""
        starts = range(self._size, len(self._ranks), self._size)
        return [self._ranks[at : at + self._size] for at in starts]

    def late(self, deadline: float) -> float:
        """When the leader, which has until then, stops leaving blocks to their heads from now."""
        now = time.monotonic()
        patience = max(_LATE, len(self._ranks) / _RANKS_A_SECOND)
        return now + min(patience, (deadline - now) / 2)


class Reports:
    """The blocks that the leader has not heard of yet, in order.

    Args:
        blocks: of this rank, the leader.
        deadline: until when it waits for them.
    """

    def __init__(self, blocks: Blocks, deadline: float) -> None:
        self.missing = blocks.reporting()
        self._late = blocks.late(deadline)

    @property
    def late(self) -> bool:
        """Whether the leader reads for itself now, one block at a time."""
        return time.monotonic() >= self._late

    def awaited(self) -> list[int]:
        """Whom the leader waits for, as far as it can tell."""
        heads = [block[0] for block in self.missing]
        return [*(self.missing[0] if self.missing and self.late else ()), *heads]

    def all_here(
        self,
        reported: Callable[[Sequence[Sequence[int]]], bool],
        said: Callable[[Sequence[int]], bool],
        *,
        hurry: bool = False,
    ) -> bool:
        """Whether every block has said everything.

        Args:
            reported: whether the heads of all these blocks have reported.
            said: whether a block has, asked where its head is late.
            hurry: not to wait for heads.
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
    """The key of a folder where the head of a block says what all of the block have said."""
    return f"{folder}/block of {block[0]}"
