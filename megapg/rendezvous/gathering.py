"""Gather one text from every rank through a folder of the store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from megapg.rendezvous.store import Store, batches

# Seconds that a follower waits for the leader beyond the deadline, as the leader's error says more.
GRACE = 2.0
# The longest pause between two polls of the store, in seconds.
PAUSE = 0.05
# With more ranks than this, the store is too slow if every rank reads the keys of every other.
LARGE = 64
# With more ranks than this, a single follower reads the texts of all ranks if the leader is silent.
MANY = 1_024


class Gathering:
    """Ranks that share a store. The first rank leads.

    Args:
        store: a store for this meeting alone.
        name: the name of the meeting, for messages.
        rank: this rank.
        ranks: all ranks, in the same order on each.
    """

    def __init__(self, store: Store, name: str, rank: int, ranks: Sequence[int]) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._leading = rank == ranks[0]
        self._said: set[str] = set()  # keys that this rank deletes at the end

    def _gather(
        self,
        folder: str,
        deadline: float,
        silence: str = "",
        hopeless: Callable[[], bool] = lambda: False,
        *,
        leader_only: bool = False,
    ) -> dict[int, str]:
        """Return the texts that all ranks have written to a folder, the same on all ranks.

        The leader writes the result for all ranks. A follower that has waited too long writes a
        result in its place. The first result counts, so either all ranks go on, or none does.

        Args:
            folder: the folder, with one key per rank.
            deadline: the leader's deadline. A follower waits a little longer.
            silence: stands for the text of a rank that wrote none; empty to leave such ranks out.
            hopeless: returns True if the wait is pointless.
            leader_only: a follower that gives up blames the leader, and reads no other rank's key.
        """
        outcome = f"{folder}/all"
        told = partial(self._store.check, [outcome])
        done = self._all_said(folder) if self._leading else told
        here = False

        def here_or_hopeless() -> bool:
            nonlocal here
            here = done()
            return here or hopeless()

        if self._leading:
            self._until(here_or_hopeless, deadline)
            return self._settle(outcome, self._answers(folder, self._ranks, silence))
        self._until(here_or_hopeless, deadline + GRACE)
        if not here and len(self._ranks) > MANY and self._store.add(f"{outcome}/late", 1) > 1:
            self._until(told, deadline + 2 * GRACE)  # another follower reads the texts
            leader_only = True
        if here or told():
            return by_rank(self._store.get(outcome))
        leader = self._ranks[0]
        if leader_only:
            return self._settle(outcome, {leader: silence} if silence else {})
        heard = self._answers(folder, self._ranks, silence)
        if silence:
            heard = heard or {leader: "did not answer in time"}
        else:
            heard.pop(leader, None)  # the leader is the rank that did not write the result
        return self._settle(outcome, heard)

    def _all_said(self, folder: str) -> Callable[[], bool]:
        """On the leader: return a function that is true if every rank has written its text."""
        missing = batches([f"{folder}/{rank}" for rank in self._ranks])

        def all_said() -> bool:
            while missing and self._store.check(missing[0]):
                missing.pop(0)
            return not missing

        return all_said

    def _until(self, done: Callable[[], bool], deadline: float, longest: float = PAUSE) -> bool:
        """Poll until ``done()``. Return False if the deadline passes first.

        Polls often at first, then at intervals of a twentieth of the time waited. Polls less often
        in large jobs, to spare the store.
        """
        started = time.monotonic()
        shortest = 0.001 + len(self._ranks) / (100_000 if self._leading else 20_000)
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            pause = min(max((now - started) / 20, shortest), shortest + longest)
            time.sleep(min(pause, deadline - now))
        return True

    def _until_then(self, deadline: float) -> contextlib.AbstractContextManager[None]:
        """Context of calls to the store that end by the deadline plus two seconds."""
        return self._store.until(deadline + GRACE, repr(self._name))

    def _answers(self, prefix: str, ranks: Sequence[int], silence: str) -> dict[int, str]:
        """Return rank -> text, with ``silence`` for ranks that wrote none, without empty texts."""
        found = self._store.peeks([f"{prefix}/{rank}" for rank in ranks])
        said = [silence if text is None else text.decode() for text in found]
        return {rank: text for rank, text in zip(ranks, said, strict=True) if text}

    def _settle(self, key: str, word: Mapping[int, str]) -> dict[int, str]:
        """Write the result unless there is one. Return the result, the same on all ranks."""
        return by_rank(self._store.compare_set(key, "", by_word(word)))

    def _take_back(self) -> None:
        """Delete this rank's keys. In a large job the leader can't delete them for all ranks."""
        while self._said:
            self._store.delete_key(self._said.pop())

    def _forget(self, folders: Collection[str]) -> None:
        """Delete all keys in these folders, also those that communicators left there."""
        for key in self._store.list_keys():
            if key.partition("/")[0] in folders:
                self._store.delete_key(key)


def by_word(said: Mapping[int, str]) -> str:
    """Encode rank -> text as text -> ranges of ranks with that text.

    Every rank reads the result, and mostly all texts are equal.
    """
    words: dict[str, list[list[int]]] = {}
    for rank in sorted(said):
        rows = words.setdefault(said[rank], [])
        if rows and rows[-1][1] == rank - 1:
            rows[-1][1] = rank
        else:
            rows.append([rank, rank])
    return json.dumps(words)


def by_rank(text: bytes | str) -> dict[int, str]:
    """Decode the output of :func:`by_word`. The ranks are in order."""
    words: dict[str, list[tuple[int, int]]] = json.loads(text)
    rows = sorted((first, last, word) for word, rows in words.items() for first, last in rows)
    return {rank: word for first, last, word in rows for rank in range(first, last + 1)}
