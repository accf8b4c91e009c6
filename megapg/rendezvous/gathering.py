"""Gather one text from every rank through the store, and disconnect ranks that have met."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from megapg.rendezvous.error_texts import ALONE, LISTED, THE_STORE, RankNames, with_note
from megapg.rendezvous.hello import DIED, STAY, Hello, Hellos, fate
from megapg.rendezvous.store import Store, StoreError, batches

# Seconds that a follower waits for the leader beyond the deadline, as the leader's error says more.
GRACE = 2.0
# The longest pause between two polls of the store, in seconds.
PAUSE = 0.05
# With more ranks than this, the store is too slow if every rank reads the keys of every other.
LARGE = 64
# With more ranks than this, a single follower reads the texts of all ranks if the leader is silent.
MANY = 1_024
# Reported for a rank that did not come to the end of the meeting.
_SILENT = "did not answer"


class Gathering:
    """Ranks that share a store. The first rank leads.

    Args:
        store: a store for this meeting alone.
        name: the name of the meeting, for messages.
        rank: this rank.
        ranks: all ranks, in the same order on each.
        hosts: rank -> the host it runs on, for the messages; empty if unknown.
        names: the names of ranks in messages.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        hosts: Sequence[str],
        names: RankNames,
    ) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks
        self._hellos = Hellos(store, name, rank, ranks, hosts, names)
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

    # -- the end -----------------------------------------------------------------------------

    @property
    def _mine(self) -> Hello:
        return self._hellos.mine

    def part(self, problem: BaseException | None, *, timeout: float) -> dict[int, str]:
        """Report how this rank ended, and return the errors of all ranks.

        Args:
            problem: the error of this rank, or None.
            timeout: seconds to wait for the other ranks. A rank with an error does not wait.

        Returns:
            rank -> error. Includes ranks that did not answer in time, ``ALONE`` for a rank that
            ended by :meth:`leave`, and ``THE_STORE`` if the store is gone. Empty if no rank has an
            error and every rank knows it.
        """
        deadline = time.monotonic() + (timeout if problem is None else 0.0)
        try:
            with self._until_then(deadline):
                problems = self._located(self._take_leave(problem, deadline))
                if problems:
                    # This process may host the store and exit next. Other ranks may not have failed
                    # yet, and need the store to find out which rank is to blame.
                    byes = [f"{self._mine.namespace}/bye/{rank}" for rank in self._ranks]
                    self._store.stay(lambda: self._store.check(byes) and self._all_closed(), STAY)
                return problems
        except StoreError as error:
            if not error.gone:  # if the store comes back, this rank must not look live
                self._hellos.mine = replace(self._mine, state="closed")
                words = {f"hello/{self._rank}": json.dumps(vars(self._mine))}
                if problem is not None:
                    words |= self._bye(with_note(problem))
                self._store.post(words)
            return self._lost(error)

    def leave(self) -> None:
        """Report that this rank has left without an error, and wait for no other rank."""
        with contextlib.suppress(StoreError), self._until_then(time.monotonic()):
            self._store.multi_set(self._bye(ALONE))
            if self._leading:  # the leader will not collect the errors of the others
                self._settle(f"{self._mine.namespace}/bye/all", {self._rank: ALONE})
            self._hellos.say(state="closed")

    def _take_leave(self, problem: BaseException | None, deadline: float) -> dict[int, str]:
        bye = f"{self._mine.namespace}/bye"
        word = "" if problem is None else with_note(problem)
        self._store.multi_set(self._bye(word))
        if problem is not None:
            problems = {self._rank: with_note(problem)}
            if self._leading:  # include the errors so far, which may be the cause
                problems |= self._answers(bye, self._ranks, "")
                self._settle(f"{bye}/all", problems)
        else:
            problems = self._gather(bye, deadline, _SILENT, leader_only=True)
            if not self._leading:
                # Before the leader exits, and perhaps the store with it. The leader deletes the
                # keys.
                tidied = {} if problems else {"namespace": "", "leftover": []}
                if not problems:
                    self._said.add(f"{bye}/{self._rank}")
                    self._take_back()
                self._hellos.say(state="closed", **tidied)
                self._store.add(f"{bye}/heard", 1)
                # This process may host the store, and the leader closes last.
                self._store.stay(self._leader_has_closed, GRACE)
                return problems
            # This process may host the store, so wait until the others have read the result. After
            # an error, some ranks may still be busy, so their keys stay for the next meeting.
            others = len(self._ranks) - 1
            if not problems and self._until(
                lambda: not others or self._store.peek(f"{bye}/heard") == b"%d" % others,
                deadline + GRACE,
            ):
                self._said.clear()
                self._forget([self._mine.namespace, "verdict"])
                self._hellos.say(namespace="")
        self._hellos.say(state="closed")
        return problems

    def _all_closed(self) -> bool:
        hellos = self._hellos.of_all(self._ranks).values()
        return all(hello is None or hello.state != "live" for hello in hellos)

    def _leader_has_closed(self) -> bool:
        hello = self._hellos.of(self._ranks[0])
        return hello is None or hello.state == "closed"

    def _bye(self, word: str) -> dict[str, str]:
        """Return the keys to write when this rank leaves, with its error or an empty text."""
        bye = f"{self._mine.namespace}/bye"
        return {f"{bye}/{self._rank}": word, f"{bye}/any": ""}

    def news(self, *, wait: float) -> dict[int, str]:
        """Return the other ranks' errors after :meth:`part` with an error, and the silent ranks.

        In a large job the leader alone reads all ranks' keys, and writes the result for the others.

        Args:
            wait: seconds to wait for ranks that have not reported. With 0 they are left out.

        Returns:
            rank -> error, without the ranks that reported none.
        """
        bye = f"{self._mine.namespace}/bye"
        deadline = time.monotonic() + wait
        large = len(self._ranks) > LARGE
        try:
            with self._until_then(deadline):
                if self._leading or not large:
                    found = self._hear_all(bye, deadline, silent_too=wait > 0)
                    if large:
                        self._settle(f"{bye}/news", found)
                elif self._until(lambda: self._store.check([f"{bye}/news"]), deadline + wait):
                    found = by_rank(self._store.get(f"{bye}/news"))
                else:
                    found = self._silence(self._ranks[:1]) if wait else {}
        except StoreError as error:
            return self._lost(error)
        return {rank: found[rank] for rank in sorted(found) if rank != self._rank}

    def _hear_all(self, bye: str, deadline: float, *, silent_too: bool) -> dict[int, str]:
        everyone = [f"{bye}/{rank}" for rank in self._ranks]
        if self._until(lambda: self._store.check(everyone), deadline) or not silent_too:
            return self._answers(bye, self._ranks, "")
        said = {rank: self._store.peek(f"{bye}/{rank}") for rank in self._ranks}
        silent = self._silence([rank for rank, word in said.items() if word is None])
        return {rank: word.decode() for rank, word in said.items() if word} | silent

    def _silence(self, ranks: Sequence[int]) -> dict[int, str]:
        return {
            rank: f"not a word{_process(hello)}: {fate(hello) or 'killed, stuck, or still at work'}"
            for rank, hello in self._hellos.of_all(ranks).items()
        }

    def died(self, *, wait: float) -> dict[int, str]:
        """Return the ranks on this host that died without a report; wait for those about to end."""
        if len(self._ranks) > LARGE:  # the store is too slow if every rank reads all hellos
            return {}
        found: dict[int, str] = {}
        deadline = time.monotonic() + wait

        def look() -> bool:
            hellos = self._hellos.of_all([rank for rank in self._ranks if rank != self._rank])
            gone = {r: h for r, h in hellos.items() if h and h.state == "live" and fate(h) == DIED}
            said = self._answers(f"{self._mine.namespace}/bye", [*gone], _SILENT)
            silent = [rank for rank, word in said.items() if word == _SILENT]
            found.update({rank: DIED + _process(gone[rank]) for rank in silent})
            return bool(found)

        with contextlib.suppress(StoreError), self._until_then(deadline):
            self._until(look, deadline)
        return found

    def _located(self, problems: dict[int, str]) -> dict[int, str]:
        """Add the host to ranks that did not answer, to as many as a message lists.

        Each rank reads the hosts itself: the leader's result stays short if many are silent.
        """
        silent = [rank for rank, said in problems.items() if said == _SILENT][:LISTED]
        with contextlib.suppress(StoreError):
            hellos = self._hellos.of_all(silent)
            died = {rank: f", {DIED}" for rank in silent if fate(hellos[rank]) == DIED}
            where = {rank: _process(hellos[rank]) + died.get(rank, "") for rank in silent}
            return problems | {rank: _SILENT + where[rank] for rank in silent}
        return problems

    def _lost(self, error: StoreError) -> dict[int, str]:
        """Return rank that hosts the store -> why the store is gone."""
        host = self._store.host.rank
        return {THE_STORE if host is None else host: error.reason}


def _process(hello: Hello | None) -> str:
    return f" (process {hello.pid} on {hello.host})" if hello else ""


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
