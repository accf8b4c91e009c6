"""Words that all ranks put into a folder of the store, and what all of them then hear."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from megapg.rendezvous.store import Store, batches

# How long beyond its deadline a rank waits for the leader's word: the leader knows more, so its
# error is the better one. Seconds.
GRACE = 2.0
# The longest pause between two questions to the store, in seconds.
PAUSE = 0.05


class Gathering:
    """Ranks that share a store, of which the first one leads.

    Args:
        store: where they meet, which nobody else uses.
        name: of their meeting, for messages.
        rank: this rank.
        ranks: all of them, in the same order on each.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._leading = rank == ranks[0]
        self._said: set[str] = set()  # keys of this rank's that nobody needs in the end

    def _gather(
        self,
        folder: str,
        deadline: float,
        silence: str = "",
        hopeless: Callable[[], bool] = lambda: False,
        *,
        leader_only: bool = False,
    ) -> dict[int, str]:
        """Hear what every rank has said in a folder, in which this one has: the same on all ranks.

        The leader says it for all. A follower that has waited for it for too long does in its
        place: either all go on, or none does.

        Args:
            folder: where rank -> what it says.
            deadline: of the leader; a follower waits a little longer.
            silence: stands for what a rank says that says nothing; empty if it is to be left out.
            hopeless: whether nothing more will come.
            leader_only: a follower that gives up blames the leader, and asks about nobody else.
        """
        outcome = f"{folder}/all"
        awaited = [f"{folder}/{r}" for r in self._ranks] if self._leading else [outcome]
        missing, here = batches(awaited), False

        def here_or_hopeless() -> bool:
            nonlocal here
            while missing and self._store.check(missing[0]):
                missing.pop(0)
            here = not missing
            return here or hopeless()

        self._until(here_or_hopeless, deadline if self._leading else deadline + GRACE)
        if not self._leading and (here or self._store.check(awaited)):
            return self._read_problems(outcome)
        if leader_only and not self._leading:
            return self._settle(outcome, {self._ranks[0]: silence})
        heard = self._answers(folder, silence)
        if not self._leading and silence:
            heard = heard or {self._ranks[0]: "did not answer in time"}
        elif not self._leading:
            heard.pop(self._ranks[0], None)  # it was to tell us
        return self._settle(outcome, heard)

    def _until(self, done: Callable[[], bool], deadline: float, longest: float = PAUSE) -> bool:
        """Whether it was done by the deadline.

        Asks often at first and ever less, so that it is late by a twentieth of the wait at most;
        and less in large jobs, to spare the store.
        """
        started = time.monotonic()
        shortest = 0.001 + len(self._ranks) / 20_000
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            pause = min(max((now - started) / 20, shortest), shortest + longest)
            time.sleep(min(pause, deadline - now))
        return True

    def _until_then(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        """Around calls to the store: they end by the deadline, and two seconds."""
        return self._store.until(deadline + GRACE, repr(self._name))

    def _answers(self, prefix: str, silence: str) -> dict[int, str]:
        """rank -> what it said went wrong, or ``silence`` where it said nothing at all."""
        found = self._store.peeks([f"{prefix}/{rank}" for rank in self._ranks])
        said = [silence if text is None else text.decode() for text in found]
        return {rank: text for rank, text in zip(self._ranks, said, strict=True) if text}

    def _read_problems(self, key: str) -> dict[int, str]:
        return _by_rank(self._store.get(key))

    def _settle(self, key: str, word: Mapping[int, str]) -> dict[int, str]:
        """Say it for everyone, unless somebody has already; what was said, the same on all ranks.

        The leader says how things stand, and a follower that gives up waiting for it says so in the
        same place: either all go on, or none does.
        """
        return _by_rank(self._store.compare_set(key, "", _by_word(word)))

    def _take_back(self) -> None:
        """Delete what this rank said: the leader of a large job can't for all."""
        while self._said:
            self._store.delete_key(self._said.pop())

    def _forget(self, folders: Collection[str]) -> None:
        """Delete the keys inside these folders, those that communicators left there included."""
        for key in self._store.list_keys():
            if key.partition("/")[0] in folders:
                self._store.delete_key(key)


def _by_word(said: Mapping[int, str]) -> str:
    """Each word once, with the ranks that said it, as first and last of those in a row.

    Every rank reads it, and mostly all have said the same.
    """
    words: dict[str, list[list[int]]] = {}
    for rank in sorted(said):
        rows = words.setdefault(said[rank], [])
        if rows and rows[-1][1] == rank - 1:
            rows[-1][1] = rank
        else:
            rows.append([rank, rank])
    return json.dumps(words)


def _by_rank(text: bytes) -> dict[int, str]:
    words: dict[str, list[list[int]]] = json.loads(text)
    rows = sorted((row, word) for word, each in words.items() for row in each)
    return {rank: word for (first, last), word in rows for rank in range(first, last + 1)}
