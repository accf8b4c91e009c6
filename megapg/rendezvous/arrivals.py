"""Track which ranks have arrived at a rendezvous, on the leader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megapg.rendezvous.hello import CHANGES, Hello, Hellos
from megapg.rendezvous.store import Store, batches

# With more ranks than this, the store is too slow if every rank reads the keys of every other.
LARGE = 64


class Arrivals:
    """The ranks that have arrived, as the leader sees them.

    With few ranks, the leader reads each hello. With more than ``LARGE``, it reads them in batches,
    and again when a rank has left.

    Attributes:
        hellos: rank -> its last hello.
    """

    def __init__(self, store: Store, said: Hellos, ranks: Sequence[int]) -> None:
        self.hellos: dict[int, Hello | None] = dict.fromkeys(ranks)
        self._store, self._said, self._ranks = store, said, ranks
        self._large = len(ranks) > LARGE
        self._changes: bytes | None = None
        self._unseen, self._waiting = batches(ranks), list(ranks)

    def look(self) -> list[int]:
        """Check the ranks that have not arrived. Return those still missing."""
        if not self._large:
            # An early rank may have given up by the time that the last one arrives.
            self._waiting = self.look_at(self._waiting) or self.look_at(self._ranks)
            return self._waiting
        if self._has_changed():
            self._unseen = batches(self._ranks)
            return self.look_at(self._ranks)
        while self._unseen and self._all_here(self._unseen[0]):
            self._unseen.pop(0)
        return [rank for batch in self._unseen for rank in batch]

    def look_again(self, waiting: list[int]) -> list[int]:
        """With few ranks, check all again if a rank has left. Return the missing ranks."""
        if not self._large and self._has_changed():
            waiting = self._waiting = self.look_at(self._ranks)
        return waiting

    def look_at_all(self) -> None:
        """In a large job, read every hello, as the deadline has passed."""
        if self._large:
            self.look_at(self._ranks)

    def look_at(self, ranks: Sequence[int]) -> list[int]:
        """Read the hellos of these ranks. Return the ranks that have not arrived."""
        for rank, hello in self._said.of_all(ranks).items():
            self.hellos[rank] = hello
            self._said.refuse_if_behind(rank, hello)
            if hello and self._has_its_verdict(hello):
                self.hellos[rank] = replace(hello, state="left")
        return [r for r in ranks if (h := self.hellos[r]) is None or h.state != "arrived"]

    def _all_here(self, ranks: Sequence[int]) -> bool:
        return self._store.check([f"hello/{rank}" for rank in ranks]) and not self.look_at(ranks)

    def _has_changed(self) -> bool:
        before, self._changes = self._changes, self._store.peek(CHANGES)
        return self._changes != before

    def _has_its_verdict(self, hello: Hello) -> bool:
        """True if the hello is of a failed attempt, whose verdict the rank has yet to read."""
        later = hello.attempt != self._said.mine.attempt
        return later and self._store.check([f"verdict/{hello.nonce}"])
