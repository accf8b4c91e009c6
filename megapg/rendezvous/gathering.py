"""Words that all ranks put into a folder of the store, and what all of them then hear."""

from __future__ import annotations

import bisect
import contextlib
import json
import time
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping, Sequence

from megapg.rendezvous.blocks import FLAT, Blocks, Reports, report_key
from megapg.rendezvous.store import Store, batches

# How long beyond its deadline a rank waits for the leader's word: the leader knows more, so its
# error is the better one. Seconds.
GRACE = 2.0
# The longest pause between two questions to the store, in seconds.
PAUSE = 0.05
# In a folder: somebody has said something else than at first, so that reports may be out of date.
CHANGED = "changed"


class Words(Mapping[int, str]):
    """rank -> what it said. Ranks in a row that said the same take no more room than one.

    Args:
        rows: first and last of such ranks, and what they said; in order.
    """

    def __init__(self, rows: Sequence[tuple[int, int, str]]) -> None:
        self._rows = rows

    def __getitem__(self, rank: int) -> str:
        at = bisect.bisect(self._rows, rank, key=lambda row: row[0]) - 1
        if at < 0 or rank > self._rows[at][1]:
            raise KeyError(rank)
        return self._rows[at][2]

    def __iter__(self) -> Iterator[int]:
        return (rank for first, last, _ in self._rows for rank in range(first, last + 1))

    def __len__(self) -> int:
        return sum(last + 1 - first for first, last, _ in self._rows)

    def items(self) -> ItemsView[int, str]:
        """Without a search for each rank."""
        return _Items(self)

    def rows(self) -> Iterator[tuple[int, str]]:
        """rank and what it said, in order."""
        return ((r, word) for first, last, word in self._rows for r in range(first, last + 1))

    def different(self) -> set[str]:
        """What was said, each once."""
        return {word for _, _, word in self._rows}

    def each(self, change: Callable[[str], str]) -> Words:
        """The same ranks, with each word put through ``change`` once."""
        words = {word: change(word) for word in self.different()}
        return Words([(first, last, words[word]) for first, last, word in self._rows])


class _Items(ItemsView[int, str]):
    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self._words = words

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return self._words.rows()


class Gathering:
    """Ranks that share a store, of which the first one leads.

    Args:
        store: where they meet, which nobody else uses.
        name: of their meeting, for messages.
        rank: this rank.
        ranks: all of them, in the same order on each.
        flat: up to how many of them the leader hears each one by itself; from there on they are
            in blocks. The same on all ranks.
    """

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], *, flat: int = FLAT
    ) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._blocks = Blocks(ranks, rank, flat)
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
    ) -> Words:
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
        here = False
        done = self._all_said(folder, deadline) if self._leading else self._is_told(folder)

        def here_or_hopeless() -> bool:
            nonlocal here
            here = done()
            return here or hopeless()

        if not self._leading:
            # In blocks their heads are the first to give up: fewer ask about all others then.
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
            heard.pop(self._ranks[0], None)  # it was to tell us
        return self._settle(outcome, heard)

    def _all_said(self, folder: str, deadline: float) -> Callable[[], bool]:
        """On the leader: whether all ranks have said something in the folder."""
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
        """On any other rank: whether all know. The head of a block reports meanwhile."""
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
        """Whether it was done by the deadline.

        Asks often at first and ever less, so that it is late by a twentieth of the wait at most;
        and less in large jobs, to spare the store.
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
        """Around calls to the store: they end by the deadline, and two seconds."""
        return self._store.until(deadline + GRACE, repr(self._name))

    def _all_answers(self, folder: str, silence: str) -> dict[int, str]:
        """rank -> what it said, of all: by the reports of the heads, as far as they go."""
        blocks = self._blocks.reporting()
        if not blocks or self._store.check([f"{folder}/{CHANGED}"]):
            return self._answers(folder, self._ranks, silence)
        found = self._answers(folder, self._blocks.leaders, silence)
        reports = self._store.peeks([report_key(folder, block) for block in blocks])
        for block, report in zip(blocks, reports, strict=True):
            found |= by_rank(report) if report else self._answers(folder, block, silence)
        return found

    def _answers(self, prefix: str, ranks: Sequence[int], silence: str) -> dict[int, str]:
        """rank -> what it said went wrong, or ``silence`` where it said nothing at all."""
        found = self._store.peeks(_keys(prefix, ranks))
        said = [silence if text is None else text.decode() for text in found]
        return {rank: text for rank, text in zip(ranks, said, strict=True) if text}

    def _read_problems(self, key: str) -> Words:
        return by_rank(self._store.get(key))

    def _settle(self, key: str, word: Mapping[int, str]) -> Words:
        """Say it for everyone, unless somebody has already; what was said, the same on all ranks.

        The leader says how things stand, and a follower that gives up waiting for it says so in the
        same place: either all go on, or none does.
        """
        return by_rank(self._store.compare_set(key, "", by_word(word)))

    def _to_take_back(self, folder: str, said: set[str]) -> set[str]:
        """What this rank deletes of what it and others said, once all have heard the outcome.

        The head of a block does it for all of it: the leader may have heard them before the head
        did, which would wait for keys that are gone.

        Args:
            folder: where they said it.
            said: keys that this rank wrote.
        """
        if self._blocks.heading:
            return said.union(_keys(folder, self._blocks.mine))
        return said if self._blocks.head == self._ranks[0] else set()

    def _take_back(self) -> None:
        """Delete what this rank said: the leader of a large job can't for all."""
        while self._said:
            self._store.delete_key(self._said.pop())

    def _forget(self, folders: Collection[str]) -> None:
        """Delete the keys inside these folders, those that communicators left there included."""
        for key in self._store.list_keys():
            if key.partition("/")[0] in folders:
                self._store.delete_key(key)


def _keys(folder: str, ranks: Sequence[int]) -> list[str]:
    return [f"{folder}/{rank}" for rank in ranks]


def by_word(said: Mapping[int, str]) -> str:
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


def by_rank(text: bytes | str) -> Words:
    """What :func:`by_word` has written."""
    words: dict[str, list[list[int]]] = json.loads(text)
    return Words(
        sorted((first, last, word) for word, rows in words.items() for first, last in rows)
    )
