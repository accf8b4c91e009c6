"""Track which ranks have arrived at a rendezvous, on the leader and on the heads of blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from megapg.rendezvous.blocks import Blocks, Reports
from megapg.rendezvous.hello import CHANGES, Hello, Hellos
from megapg.rendezvous.store import Store, batches

# With more ranks than this, the store is too slow if every rank reads the keys of every other.
LARGE = 64


class Arrivals:
    """The ranks that have arrived, as the leader sees them.

    With few ranks, the leader reads each hello. With more than ``LARGE``, it reads them in batches,
    and again when a rank has left. If there are several blocks, it reads the reports of their
    heads, until a rank has left.

    Attributes:
        hellos: rank -> its last hello. It has no nonce if the rank's head reported the rank.
    """

    def __init__(
        self, store: Store, said: Hellos, ranks: Sequence[int], blocks: Blocks, deadline: float
    ) -> None:
        self.hellos: dict[int, Hello | None] = dict.fromkeys(ranks)
        self._store, self._said, self._ranks = store, said, ranks
        self._by_heads = blocks.several
        self._large = self._by_heads or len(ranks) > LARGE
        self._changes: bytes | None = None
        self._reports, self._unseen = Reports(blocks, deadline), batches(ranks)
        heads = [block[0] for block in self._reports.missing]
        self._waiting = [*blocks.mine, *heads]

    def look(self) -> list[int]:
        """Check the ranks that have not arrived. Return those still missing."""
        if not self._large:
            # An early rank may have given up by the time that the last one arrives.
            self._waiting = self.look_at(self._waiting) or self.look_at(self._ranks)
            return self._waiting
        if self._has_changed():
            self._by_heads, self._unseen = False, batches(self._ranks)
            return self.look_at(self._ranks)
        return self._look_at_heads() if self._by_heads else self._look_at_batches()

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

    def _look_at_batches(self) -> list[int]:
        while self._unseen and self._all_here(self._unseen[0]):
            self._unseen.pop(0)
        return [rank for batch in self._unseen for rank in batch]

    def _look_at_heads(self) -> list[int]:
        if self._waiting and self._have_said_hello(self._waiting):
            self._waiting = self.look_at(self._waiting)
        if self._waiting:
            return self._waiting
        here = self._reports.all_here(self._reported, self._all_here)
        return [] if here else self._reports.awaited()

    def _reported(self, blocks: Sequence[Sequence[int]]) -> bool:
        """True if these blocks have arrived, by the reports of their heads."""
        heads = [hello for block in blocks if (hello := self.hellos[block[0]])]
        keys = [_report_key(block[0]) for block in blocks]
        if len(heads) < len(blocks) or not self._store.check(keys):
            return False
        mine, here = self._said.mine, True
        for block, head, text in zip(blocks, heads, self._store.multi_get(keys), strict=True):
            likeness = _if_current(text, head)
            if likeness is None:
                here = False
            elif likeness == mine.likeness():
                self.hellos.update(dict.fromkeys(block[1:], replace(mine, nonce="")))
            elif self.look_at(block):
                here = False
        return here

    def _all_here(self, ranks: Sequence[int]) -> bool:
        return self._have_said_hello(ranks) and not self.look_at(ranks)

    def _have_said_hello(self, ranks: Sequence[int]) -> bool:
        return self._store.check([f"hello/{rank}" for rank in ranks])

    def _has_changed(self) -> bool:
        before, self._changes = self._changes, self._store.peek(CHANGES)
        return self._changes != before

    def _has_its_verdict(self, hello: Hello) -> bool:
        """True if the hello is of a failed attempt, whose verdict the rank has yet to read."""
        later = hello.attempt != self._said.mine.attempt
        return later and self._store.check([f"verdict/{hello.nonce}"])


class BlockArrivals:
    """The ranks of a block that have arrived, as its head sees them and reports to the leader.

    Attributes:
        keys: the keys that this rank has written.
    """

    def __init__(self, store: Store, said: Hellos, block: Sequence[int]) -> None:
        self._store, self._said = store, said
        self._head = block[0] if block else -1
        self._waiting, self._here = list(block), dict[int, Hello]()
        self.keys: set[str] = set()

    def look(self) -> None:
        """Check the ranks that have not arrived. When all have, report if their hellos match.

        Hellos of another attempt are left to the leader.
        """
        if not self._waiting or not self._store.check([f"hello/{r}" for r in self._waiting]):
            return
        mine = self._said.mine
        for rank, hello in self._said.of_all(self._waiting).items():
            if hello and hello.state == "arrived" and hello.attempt == mine.attempt:
                self._here[rank] = hello
        self._waiting = [rank for rank in self._waiting if rank not in self._here]
        if not self._waiting:
            said = {hello.likeness() for hello in self._here.values()}
            nonces = " ".join(hello.nonce for hello in self._here.values())
            likeness = said.pop() if len(said) == 1 else ""
            words = {
                _nonces_key(self._head): _report_text(nonces, mine),
                _report_key(self._head): _report_text(likeness, mine),
            }
            self.keys.update(words)
            self._store.multi_set(words)

    def pass_on(self, verdict: bytes) -> None:
        """Pass the leader's verdict on to the ranks that were reported to it."""
        if not self._waiting:
            others = {hello.nonce for hello in self._here.values()} - {self._said.mine.nonce}
            self._store.multi_set({f"verdict/{nonce}": verdict for nonce in others})


def passed_over(store: Store, said: Hellos, head: int) -> bytes | None:
    """Return the verdict that this rank's head has but has not passed on, or None."""
    hello, whom = said.of(head), store.peek(_nonces_key(head))
    if hello is None or whom is None:
        return None
    if said.mine.nonce not in (_if_current(whom, hello) or "").split():
        return None
    return store.peek(f"verdict/{hello.nonce}")


# A report belongs to one attempt of one process. Only the head deletes or overwrites it: other
# ranks may be in the next meeting while the leader deletes the keys of this one.


def _report_key(head: int) -> str:
    return f"report/{head}"


def _nonces_key(head: int) -> str:
    return f"report/{head}/whom"


def _report_text(said: str, head: Hello) -> str:
    return json.dumps([head.nonce, head.attempt, said])


def _if_current(text: bytes, head: Hello) -> str | None:
    """Return the text of a report, or None if the report is of an earlier attempt."""
    nonce, attempt, said = json.loads(text)
    return str(said) if (nonce, attempt) == (head.nonce, head.attempt) else None
