"""Gather one text from every rank through a folder of the store."""

from __future__ import annotations

import bisect
import contextlib
import json
import time
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence

from typing_extensions import override

from megapg.rendezvous.blocks import FLAT, Blocks, Reports, report_key
from megapg.rendezvous.store import Store, batches

# Seconds that a follower waits for the leader beyond the deadline, as the leader's error says more.
GRACE = 2.0
# The longest pause between two polls of the store, in seconds.
PAUSE = 0.05
# Key in a folder: a rank has changed its text, so reports may be out of date.
CHANGED = "changed"


class Words(Mapping[int, str]):
    """A map rank -> text. Consecutive ranks with the same text take the room of one.

    Args:
        rows: (first rank, last rank, text), in order.
    """

    def __init__(self, rows: Sequence[tuple[int, int, str]]) -> None:
        self._rows = rows

    @override
    def __getitem__(self, rank: int) -> str:
        at = bisect.bisect(self._rows, rank, key=lambda row: row[0]) - 1
        if at < 0 or rank > self._rows[at][1]:
            raise KeyError(rank)
        return self._rows[at][2]

    @override
    def __iter__(self) -> Iterator[int]:
        return (rank for first, last, _ in self._rows for rank in range(first, last + 1))

    @override
    def __len__(self) -> int:
        return sum(last + 1 - first for first, last, _ in self._rows)

    @override
    def items(self) -> ItemsView[int, str]:
        """Return the items without a search for each rank."""
        return _Items(self)

    def rows(self) -> Iterator[tuple[int, str]]:
        """Yield (rank, text), in order."""
        return ((r, word) for first, last, word in self._rows for r in range(first, last + 1))

    def different(self) -> set[str]:
        """Return the distinct texts."""
        return {word for _, _, word in self._rows}

    def each(self, change: Callable[[str], str]) -> Words:
        """Apply ``change`` to each distinct text."""
        words = {word: change(word) for word in self.different()}
        return Words([(first, last, words[word]) for first, last, word in self._rows])


class _Items(ItemsView[int, str]):
    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self._words = words

    @override
    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._words.rows()


class Gathering:
    """Ranks that share a store. The first rank leads.

    Args:
        store: a store for this meeting alone.
        name: the name of the meeting, for messages.
        rank: this rank.
        ranks: all ranks, in the same order on each.
        flat: with more ranks than this, they are in blocks, and the leader reads one report per
            block. The same on all ranks.
    """

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], *, flat: int = FLAT
    ) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._blocks = Blocks(ranks, rank, flat)
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
    ) -> Words:
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
        here = False
        done = self._all_said(folder, deadline) if self._leading else self._is_told(folder)

        def here_or_hopeless() -> bool:
            nonlocal here
            here = done()
            return here or hopeless()

        if not self._leading:
            # The heads of blocks give up first, so that fewer ranks read all keys.
            first = leader_only or self._blocks.heading or not self._blocks.several
            deadline += GRACE if first else 2 * GRACE
        self._until(here_or_hopeless, deadline)
        if not self._leading and (here or self._store.check([outcome])):
            return self._read_problems(outcome)
        if leader_only and not self._leading:
            return self._settle(outcome, {self._ranks[0]: silence})
        heard = self._all_answers(folder, silence)
        if not self._leading and silence:
            heard = heard or {self._ranks[0]: "did not answer in time"}
        elif not self._leading:
            heard.pop(self._ranks[0], None)  # the leader is the rank that did not write the result
        return self._settle(outcome, heard)

    def _all_said(self, folder: str, deadline: float) -> Callable[[], bool]:
        """On the leader: return a function that is true if every rank has written its text."""
        mine = batches(_keys(folder, self._blocks.mine))
        reports = Reports(self._blocks, deadline)

        def reported(blocks: Sequence[Sequence[int]]) -> bool:
            return self._store.check([report_key(folder, block) for block in blocks])

        def said(block: Sequence[int]) -> bool:
            return self._store.check(_keys(folder, block))

        def all_said() -> bool:
            while mine and self._store.check(mine[0]):
                mine.pop(0)
            if mine or reports.all_here(reported, said):
                return not mine
            hurry = self._store.check([f"{folder}/{CHANGED}"])
            return hurry and reports.all_here(reported, said, hurry=True)

        return all_said

    def _is_told(self, folder: str) -> Callable[[], bool]:
        """On a follower: return a function that is true if the result exists. Heads report too."""
        unreported = self._blocks.heading

        def is_told() -> bool:
            nonlocal unreported
            block = self._blocks.mine
            if unreported and self._store.check(_keys(folder, block)):
                unreported = False
                self._said.add(report_key(folder, block))
                said = by_word(self._answers(folder, block, ""))
                self._store.set(report_key(folder, block), said)
            return self._store.check([f"{folder}/all"])

        return is_told

    def _until(self, done: Callable[[], bool], deadline: float, longest: float = PAUSE) -> bool:
        """Poll until ``done()``. Return False if the deadline passes first.

        Polls often at first, then at intervals of a twentieth of the time waited. Polls less often
        in large jobs, to spare the store.
        """
        started = time.monotonic()
        few = self._leading or self._blocks.heading
        shortest = 0.001 + len(self._ranks) / (100_000 if self._blocks.several and few else 20_000)
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

    def _all_answers(self, folder: str, silence: str) -> dict[int, str]:
        """Return rank -> text of all ranks, from the heads' reports where they exist."""
        blocks = self._blocks.reporting()
        if not blocks or self._store.check([f"{folder}/{CHANGED}"]):
            return self._answers(folder, self._ranks, silence)
        found = self._answers(folder, self._blocks.leaders, silence)
        reports = self._store.peeks([report_key(folder, block) for block in blocks])
        for block, report in zip(blocks, reports, strict=True):
            found |= by_rank(report) if report else self._answers(folder, block, silence)
        return found

    def _answers(self, prefix: str, ranks: Sequence[int], silence: str) -> dict[int, str]:
        """Return rank -> text, with ``silence`` for ranks that wrote none, without empty texts."""
        found = self._store.peeks(_keys(prefix, ranks))
        said = [silence if text is None else text.decode() for text in found]
        return {rank: text for rank, text in zip(ranks, said, strict=True) if text}

    def _read_problems(self, key: str) -> Words:
        return by_rank(self._store.get(key))

    def _settle(self, key: str, word: Mapping[int, str]) -> Words:
        """Write the result unless there is one. Return the result, the same on all ranks."""
        return by_rank(self._store.compare_set(key, "", by_word(word)))

    def _to_take_back(self, folder: str, said: set[str]) -> set[str]:
        """Return the keys that this rank deletes once all ranks have the result.

        The head of a block deletes the keys of its block. Otherwise a head that is still waiting
        for these keys would miss them.

        Args:
            folder: the folder of the keys.
            said: keys that this rank wrote.
        """
        if self._blocks.heading:
            return said.union(_keys(folder, self._blocks.mine))
        return said if self._blocks.head == self._ranks[0] else set()

    def _take_back(self) -> None:
        """Delete this rank's keys. In a large job the leader can't delete them for all ranks."""
        while self._said:
            self._store.delete_key(self._said.pop())

    def _forget(self, folders: Collection[str]) -> None:
        """Delete all keys in these folders, also those that communicators left there."""
        for key in self._store.list_keys():
            if key.partition("/")[0] in folders:
                self._store.delete_key(key)


def _keys(folder: str, ranks: Sequence[int]) -> list[str]:
    return [f"{folder}/{rank}" for rank in ranks]


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


def by_rank(text: bytes | str) -> Words:
    """Decode the output of :func:`by_word`."""
    words: dict[str, list[list[int]]] = json.loads(text)
    return Words(
        sorted((first, last, word) for word, rows in words.items() for first, last in rows)
    )
