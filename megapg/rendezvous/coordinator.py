"""Ranks that are together agree on what to do next: a bounded exchange of words over the store."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence

from megapg.errors import RendezvousError
from megapg.rendezvous.gathering import Words
from megapg.rendezvous.problems import listed, of_a_communicator
from megapg.rendezvous.rendezvous import Agreement, Rendezvous
from megapg.rendezvous.store import LEAST, StoreError

# How often a rank that waits looks whether the one it waits for has left. Seconds.
_LOOK = 0.25
# How long a word that nobody waits for may take to be said. Seconds.
SOON = 8.0


class Coordinator(Rendezvous):
    """A rendezvous whose ranks, between :meth:`meet` and :meth:`part`, exchange words any number of
    times. Arguments are those of :class:`~megapg.rendezvous.rendezvous.Rendezvous`.
    """

    _turn = 0

    def meet(self, settings: Mapping[str, str], *, timeout: float, at_least: int = 1) -> Agreement:
        """See :meth:`~megapg.rendezvous.rendezvous.Rendezvous.meet`."""
        agreement = super().meet(settings, timeout=timeout, at_least=at_least)
        self._turn = 0
        return agreement

    def exchange(self, topic: str, said: str, *, timeout: float) -> Words:
        """Tell every rank something, and hear what each of them says. All ranks hear the same.

        Args:
            topic: what it is about, equal on every rank; for the message when it is not.
            said: what this rank has to say.
            timeout: seconds to wait for the others.

        Returns:
            rank -> what it said, of every rank.

        Raises:
            RendezvousError: ranks did not come in time, or have left, or came for something else;
                they are named on every rank that came. Or the store is gone.
        """
        folder = f"{self._mine.namespace}/turn {self._turn}"
        before = f"{self._mine.namespace}/turn {self._turn - 1}" if self._turn else ""
        self._turn += 1
        deadline = time.monotonic() + timeout
        with self._until_then(deadline):
            self._store.set(f"{folder}/{self._rank}", json.dumps([topic, said]))
            heard = self._gather(folder, deadline, hopeless=self._hopeless())
            self._said.add(f"{folder}/{self._rank}")
            if before and len(heard) == len(self._ranks):  # all have heard what was said before
                for key in [key for key in self._said if key.startswith(f"{before}/")]:
                    self._store.delete_key(key)
                    self._said.discard(key)
                if self._leading:
                    self._store.delete_key(f"{before}/all")
            self._check(topic, heard, timeout)
        return heard.each(lambda text: json.loads(text)[1])

    # -- between two exchanges: words that nobody waits for ------------------------------------

    @property
    def ranks(self) -> Sequence[int]:
        """Everyone, in the order that was given."""
        return self._ranks

    def post(self, topic: str, text: str, *, within: float = SOON) -> None:
        """Say something that stands until the next exchange has begun.

        Raises:
            RendezvousError: the store is gone.
        """
        with self._within(within):
            self._store.set(f"{self._board}/{topic}/{self._rank}", text)

    def posts(self, topic: str) -> dict[int, str]:
        """rank -> what it said last, of those that said anything."""
        with self._within(SOON):
            return self._answers(f"{self._board}/{topic}", self._ranks, "")

    def tally(self, name: str, by: int = 0, *, within: float = SOON) -> int:
        """Add to a number that all ranks share until the next exchange, and read it."""
        with self._within(within):
            return self._store.add(f"{self._board}/{name}", by)

    def _within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        deadline = time.monotonic() + seconds
        return self._store.until(deadline, repr(self._name), least=min(seconds, LEAST))

    @property
    def _board(self) -> str:
        return f"{self._mine.namespace}/board {self._turn}"

    def _hopeless(self) -> Callable[[], bool]:
        """Whether somebody whom this rank waits for has left, asked now and then."""
        whose = "any" if self._leading else self._ranks[0]
        look_again = time.monotonic() + _LOOK

        def one_has_left() -> bool:
            nonlocal look_again
            if time.monotonic() < look_again:
                return False
            look_again = time.monotonic() + _LOOK
            return self._store.peek(f"{self._mine.namespace}/bye/{whose}") is not None

        return one_has_left

    def _check(self, topic: str, heard: Words, timeout: float) -> None:
        topics = {text: json.loads(text)[0] for text in heard.different()}
        if set(topics.values()) == {topic} and len(heard) == len(self._ranks):
            return
        others = {
            rank: f" came for {topics[text]}"
            for rank, text in heard.items()
            if topics[text] != topic
        }
        absent = [rank for rank in self._ranks if rank not in heard]
        left = self._left(absent)
        broken = any(map(of_a_communicator, left.values()))
        for rank in absent:
            if rank in left:
                others[rank] = f"{self._hellos.where(rank)} has left" + (": " if left[rank] else "")
                others[rank] += left[rank].rstrip(".")
            elif left:  # nobody waited for the others then
                if broken and rank != self._rank:
                    others[rank] = f"{self._hellos.where(rank)} has not come"
            elif rank == self._rank:
                others[rank] = " came too late"
            else:
                others[rank] = f"{self._hellos.where(rank)} did not come within {timeout:g} s"
        if others:
            lines = listed(f"rank {rank}{text}" for rank, text in sorted(others.items()))
            blamed = {rank for rank in others if not of_a_communicator(left.get(rank, ""))}
            raise RendezvousError(
                f"{self._name!r}, {topic}: {lines}. Every rank must "
                "call it; look at the logs of those ranks.",
                sorted(blamed or others),
            )

    def _left(self, ranks: Sequence[int]) -> dict[int, str]:
        """rank -> why it has left, of those that have."""
        found = {}
        with contextlib.suppress(StoreError):  # the store may go with the rank
            for rank in ranks:
                why = self._store.peek(f"{self._mine.namespace}/bye/{rank}")
                if why is not None:
                    found[rank] = why.decode()
        return found
