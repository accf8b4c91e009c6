"""Who has arrived at a rendezvous, as its leader and the heads of blocks see it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from megapg.rendezvous.blocks import Blocks, Reports
from megapg.rendezvous.hello import CHANGES, Hello, Hellos
from megapg.rendezvous.store import Store, batches

# From how many ranks on it is too much for the store if every rank asks about every other.
LARGE = 64


class Arrivals:
    """Who is here, as the leader learns it.

    Few ranks it looks at one by one. Of many it takes one batch after the other, as whoever leaves
    again says so. Of very many it hears the heads of their blocks, until somebody has left.

    Attributes:
        hellos: rank -> what it last said. Those whose head has reported them have no nonce there.
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
        """Look at those who are not here yet; who still is not."""
        if not self._large:
            # Whoever came first may have given up by the time that the last one comes.
            self._waiting = self.look_at(self._waiting) or self.look_at(self._ranks)
            return self._waiting
        if self._has_changed():
            self._by_heads, self._unseen = False, batches(self._ranks)
            return self.look_at(self._ranks)
        return self._look_at_heads() if self._by_heads else self._look_at_batches()

    def look_again(self, waiting: list[int]) -> list[int]:
        """Who is not here, of few ranks: once more after a while, if somebody has left since."""
        if not self._large and self._has_changed():
            waiting = self._waiting = self.look_at(self._ranks)
        return waiting

    def look_at_all(self) -> None:
        """Look at all of a large job, whose time is up."""
        if self._large:
            self.look_at(self._ranks)

    def look_at(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks that are not here."""
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
        """Whether blocks are here, by the reports of their heads."""
        heads = [hello for block in blocks if (hello := self.hellos[block[0]])]
        keys = [_report(block[0]) for block in blocks]
        if len(heads) < len(blocks) or not self._store.check(keys):
            return False
        mine, here = self._said.mine, True
        for block, head, text in zip(blocks, heads, self._store.multi_get(keys), strict=True):
            likeness = _of_now(text, head)
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
        """Whether the rank is still here from an earlier attempt that failed: it will know soon."""
        later = hello.attempt != self._said.mine.attempt
        return later and self._store.check([f"verdict/{hello.nonce}"])


class BlockArrivals:
    """Who of a block is here, as its head learns it, which tells the leader.

    Attributes:
        keys: those that this rank has written.
    """

    def __init__(self, store: Store, said: Hellos, block: Sequence[int]) -> None:
        self._store, self._said = store, said
        self._head = block[0] if block else -1
        self._waiting, self._here = list(block), dict[int, Hello]()
        self.keys: set[str] = set()

    def look(self) -> None:
        """Look at those who are not here yet, and report when all are: that they say the same.

        What a rank says that is in another attempt the leader had better judge.
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
                _whom(self._head): _text(nonces, mine),
                _report(self._head): _text(likeness, mine),
            }
            self.keys.update(words)
            self._store.multi_set(words)

    def pass_on(self, verdict: bytes) -> None:
        """Give the leader's verdict to those that were reported to it."""
        if not self._waiting:
            others = {hello.nonce for hello in self._here.values()} - {self._said.mine.nonce}
            self._store.multi_set({f"verdict/{nonce}": verdict for nonce in others})


def passed_over(store: Store, said: Hellos, head: int) -> bytes | None:
    """The verdict that the head of this rank's block should have passed on, if it has one."""
    hello, whom = said.of(head), store.peek(_whom(head))
    if hello is None or whom is None:
        return None
    if said.mine.nonce not in (_of_now(whom, hello) or "").split():
        return None
    return store.peek(f"verdict/{hello.nonce}")


# Only the head itself deletes its reports, or writes over them: others may have come to the next
# meeting while the leader tidies up after this one. They are of one attempt of one process.


def _report(head: int) -> str:
    return f"report/{head}"


def _whom(head: int) -> str:
    return f"report/{head}/whom"


def _text(said: str, head: Hello) -> str:
    return json.dumps([head.nonce, head.attempt, said])


def _of_now(text: bytes, head: Hello) -> str | None:
    """What the report says, if it is not of an earlier attempt."""
    nonce, attempt, said = json.loads(text)
    return str(said) if (nonce, attempt) == (head.nonce, head.attempt) else None
