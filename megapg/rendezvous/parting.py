"""Disconnect ranks that have met: each reports its error, if any, and gets those of the others."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from megapg.rendezvous.gathering import GRACE, LARGE, Gathering, by_rank
from megapg.rendezvous.hello import STAY, Hello, Hellos
from megapg.rendezvous.problems import ALONE, THE_STORE, brief
from megapg.rendezvous.store import Store, StoreError


class Parting(Gathering):
    """The end of a rendezvous. Arguments are those of a rendezvous."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        hosts: Sequence[str] = (),
    ) -> None:
        super().__init__(store, name, rank, ranks)
        self._hellos = Hellos(store, name, rank, ranks, hosts)

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
                problems = self._take_leave(problem, deadline)
                if problems:
                    # This process may host the store and exit next. Other ranks may not have failed
                    # yet, and need the store to find out which rank is to blame.
                    byes = [f"{self._mine.namespace}/bye/{rank}" for rank in self._ranks]
                    self._store.stay(lambda: self._store.check(byes), STAY)
                return problems
        except StoreError as error:
            if not error.gone:  # if the store comes back, this rank must not look live
                self._hellos.mine = replace(self._mine, state="closed")
                words = {f"hello/{self._rank}": json.dumps(vars(self._mine))}
                if problem is not None:
                    words |= self._bye(brief(problem))
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
        word = "" if problem is None else brief(problem)
        self._store.multi_set(self._bye(word))
        if problem is not None:
            problems = {self._rank: brief(problem)}
            if self._leading:  # include the errors so far, which may be the cause
                problems |= self._answers(bye, self._ranks, "")
                self._settle(f"{bye}/all", problems)
        else:
            problems = self._gather(bye, deadline, "did not answer", leader_only=True)
            if not self._leading:
                # Before the leader exits, and perhaps the store with it. The leader deletes the
                # keys.
                tidied = {} if problems else {"namespace": "", "leftover": []}
                if not problems:
                    self._said.add(f"{bye}/{self._rank}")
                    self._take_back()
                self._hellos.say(state="closed", **tidied)
                self._store.add(f"{bye}/heard", 1)
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
            rank: "not a word"
            + (f" (process {hello.pid} on {hello.host})" if hello else "")
            + ": killed, stuck, or still at work"
            for rank, hello in self._hellos.of_all(ranks).items()
        }

    def _lost(self, error: StoreError) -> dict[int, str]:
        """Return rank that hosts the store -> why the store is gone."""
        host = self._store.host.rank
        return {THE_STORE if host is None else host: error.reason}
