"""Find ranks that wait for each other under two names, and so would never meet.

A rank that waits for a while writes the name of its meeting under a prefix that all names share.
The ranks that wait for it read it. A rank that does not wait long writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megapg.rendezvous.store import Store, StoreError

# In a large job, read the entries of at most so many ranks.
_MOST_READ = 8


@dataclass(frozen=True)
class Entry:
    """Where a rank waits.

    Attributes:
        name: the name of the meeting.
        ranks: the ranks of the meeting, itself included.
        nonce: identifies this wait.
    """

    name: str
    ranks: Sequence[int]
    nonce: str


class WaitingList:
    """Writes where this rank waits, and reads where other ranks wait.

    Args:
        store: shared by all the ranks.
        rank: this rank.
        name: the name of the meeting.
        ranks: the ranks of the meeting.
    """

    def __init__(self, store: Store, rank: int, name: str, ranks: Sequence[int]) -> None:
        self._store, self._rank = store.view("megapg waiting"), rank
        self._mine = Entry(name, ranks, secrets.token_hex(8))
        self._written = False
        self._seen: dict[int, str] = {}

    def elsewhere(self, awaited: Iterable[int]) -> dict[int, str]:
        """Write that this rank waits, and find awaited ranks that wait under another name.

        Returns:
            rank -> the other name, if that rank expects this rank there. Only ranks that the last
            call found as well: a rank found once may be about to leave.
        """
        if not self._written:
            self._written = True
            self._store.set(str(self._rank), _text(self._mine))
        there = self._waiting_for_me(awaited)
        twice = {r: entry.name for r, entry in there.items() if self._seen.get(r) == entry.nonce}
        self._seen = {rank: entry.nonce for rank, entry in there.items()}
        return twice

    def expecting(self) -> dict[str, Sequence[int]]:
        """Return name -> ranks of other meetings whose ranks wait for this rank."""
        if not self._written:
            return {}
        there = self._waiting_for_me(self._mine.ranks)
        return {entry.name: entry.ranks for entry in there.values()}

    def leave(self) -> None:
        """Delete this rank's entry."""
        if self._written:
            self._written = False
            with contextlib.suppress(StoreError):
                self._store.delete_key(str(self._rank))

    def _waiting_for_me(self, ranks: Iterable[int]) -> dict[int, Entry]:
        found = {}
        for rank in [rank for rank in ranks if rank != self._rank][:_MOST_READ]:
            text = self._store.peek(str(rank))
            entry = None if text is None else _entry(text)
            if entry and entry.name != self._mine.name and self._rank in entry.ranks:
                found[rank] = entry
        return found


def _text(entry: Entry) -> str:
    first, last = entry.ranks[0], entry.ranks[-1]
    in_a_row = entry.ranks == range(first, last + 1)
    ranks = [first, last] if in_a_row else list(entry.ranks)
    return json.dumps([entry.name, entry.nonce, len(entry.ranks), ranks])


def _entry(text: bytes) -> Entry:
    name, nonce, size, ranks = json.loads(text)
    return Entry(name, ranks if len(ranks) == size else range(ranks[0], ranks[1] + 1), nonce)
