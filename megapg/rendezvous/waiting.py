"""Who waits under which name: two ranks that wait for each other under two names never meet.

A rank that waits for a while writes down its name for the meeting, in one place that all names
share. The ranks that wait for it look there. A rank that is soon through writes nothing.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megapg.rendezvous.store import Store, StoreError

# How many ranks are looked for in a large job, at most.
_A_FEW = 8


@dataclass(frozen=True)
class Entry:
    """Where a rank waits.

    Attributes:
        name: under which it waits.
        ranks: whom it expects there, itself included.
        nonce: of this wait, and no other.
    """

    name: str
    ranks: Sequence[int]
    nonce: str


class WaitingList:
    """Where one rank writes down that it waits, and sees where others do.

    Args:
        store: shared by all the ranks.
        rank: this rank.
        name: under which it waits.
        ranks: whom it expects there.
    """

    def __init__(self, store: Store, rank: int, name: str, ranks: Sequence[int]) -> None:
        self._store, self._rank = store.view("megapg waiting"), rank
        self._mine = Entry(name, ranks, secrets.token_hex(8))
        self._written = False
        self._seen: dict[int, str] = {}

    def elsewhere(self, awaited: Iterable[int]) -> dict[int, str]:
        """Write down that this rank waits, and look for those that it waits for.

        Returns:
            rank -> the name under which it waits for this one. Only of ranks that the last look
            has seen there as well: they may just have been about to leave.
        """
        if not self._written:
            self._written = True
            self._store.set(str(self._rank), _text(self._mine))
        there = self._waiting_for_me(awaited)
        twice = {r: entry.name for r, entry in there.items() if self._seen.get(r) == entry.nonce}
        self._seen = {rank: entry.nonce for rank, entry in there.items()}
        return twice

    def expecting(self) -> dict[str, Sequence[int]]:
        """name -> whom they expect, of those who wait for this rank under another name."""
        if not self._written:
            return {}
        there = self._waiting_for_me(self._mine.ranks)
        return {entry.name: entry.ranks for entry in there.values()}

    def leave(self) -> None:
        """Strike out that this rank waits."""
        if self._written:
            self._written = False
            with contextlib.suppress(StoreError):
                self._store.delete_key(str(self._rank))

    def _waiting_for_me(self, ranks: Iterable[int]) -> dict[int, Entry]:
        found = {}
        for rank in [rank for rank in ranks if rank != self._rank][:_A_FEW]:
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
