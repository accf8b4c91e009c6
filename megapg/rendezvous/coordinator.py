"""Connected ranks exchange messages over the store, with deadlines, to agree on what to do next."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from megapg.errors import RendezvousError
from megapg.rendezvous.error_texts import listed, of_a_communicator
from megapg.rendezvous.rendezvous import Agreement, Rendezvous
from megapg.rendezvous.store import LEAST, StoreError

# Seconds between two checks of whether an awaited rank has left.
_CHECK_INTERVAL = 0.25
# Deadline in seconds of calls between two exchanges.
SOON = 8.0


class Coordinator(Rendezvous):
    """A rendezvous whose ranks exchange messages between :meth:`meet` and :meth:`part`.

    Arguments are those of :class:`~megapg.rendezvous.rendezvous.Rendezvous`.
    """

    _turn = 0

    @override
    def meet(self, settings: Mapping[str, str], *, timeout: float, at_least: int = 1) -> Agreement:
        """See :meth:`~megapg.rendezvous.rendezvous.Rendezvous.meet`."""
        agreement = super().meet(settings, timeout=timeout, at_least=at_least)
        self._turn = 0
        return agreement

    def exchange(self, topic: str, said: str, *, timeout: float) -> dict[int, str]:
        """Send a text to every rank, and return the texts of all ranks, the same on each rank.

        Args:
            topic: the purpose, equal on every rank. The error names it if it differs.
            said: the text of this rank.
            timeout: seconds to wait for the other ranks.

        Returns:
            rank -> text, for every rank.

        Raises:
            RendezvousError: ranks did not arrive in time, or have left, or came with another topic.
                They are named on every rank that arrived. Or the store is gone.
        """
        folder = f"{self._mine.namespace}/turn {self._turn}"
        before = f"{self._mine.namespace}/turn {self._turn - 1}" if self._turn else ""
        self._turn += 1
        deadline = time.monotonic() + timeout
        with self._until_then(deadline):
            self._store.set(f"{folder}/{self._rank}", json.dumps([topic, said]))
            heard = self._gather(folder, deadline, hopeless=self._hopeless())
            self._said.add(f"{folder}/{self._rank}")
            # every rank has read the texts of the previous exchange
            if before and len(heard) == len(self._ranks):
                for key in [key for key in self._said if key.startswith(f"{before}/")]:
                    self._store.delete_key(key)
                    self._said.discard(key)
                if self._leading:
                    self._store.delete_key(f"{before}/all")
            decoded = {text: json.loads(text) for text in set(heard.values())}  # mostly one text
            self._check(topic, {rank: decoded[text][0] for rank, text in heard.items()}, timeout)
        return {rank: decoded[text][1] for rank, text in heard.items()}

    # -- between two exchanges: messages that no rank waits for --------------------------------

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks, in the given order."""
        return self._ranks

    def elsewhere(self) -> list[int]:
        """Return the ranks that have never come, or that declined to."""
        hellos = self._hellos.of_all(self._ranks).items()
        return [rank for rank, hello in hellos if hello is None or hello.state == "declined"]

    def hosts(self) -> dict[int, str]:
        """Return rank -> its host, for ranks that have come; empty if the store is gone."""
        with contextlib.suppress(StoreError):
            hellos = self._hellos.of_all(self._ranks)
            return {rank: hello.host for rank, hello in hellos.items() if hello is not None}
        return {}

    def post(self, topic: str, text: str, *, within: float = SOON) -> None:
        """Post a text that is readable until the next exchange begins.

        Raises:
            RendezvousError: the store is gone.
        """
        with self._within(within):
            self._store.set(f"{self._board}/{topic}/{self._rank}", text)

    def posts(self, topic: str) -> dict[int, str]:
        """Return rank -> its last post, for ranks that posted."""
        with self._within(SOON):
            return self._answers(f"{self._board}/{topic}", self._ranks, "")

    def tally(self, name: str, by: int = 0, *, within: float = SOON) -> int:
        """Add to a counter that all ranks share until the next exchange. Return its value."""
        with self._within(within):
            return self._store.add(f"{self._board}/{name}", by)

    def _within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        deadline = time.monotonic() + seconds
        return self._store.until(deadline, repr(self._name), least=min(seconds, LEAST))

    @property
    def _board(self) -> str:
        return f"{self._mine.namespace}/board {self._turn}"

    def _hopeless(self) -> Callable[[], bool]:
        """Return a function that is true if an awaited rank has left. It checks at intervals."""
        whose = "any" if self._leading else self._ranks[0]
        look_again = time.monotonic() + _CHECK_INTERVAL

        def one_has_left() -> bool:
            nonlocal look_again
            if time.monotonic() < look_again:
                return False
            look_again = time.monotonic() + _CHECK_INTERVAL
            return self._store.peek(f"{self._mine.namespace}/bye/{whose}") is not None

        return one_has_left

    def _check(self, topic: str, topics: Mapping[int, str], timeout: float) -> None:
        """Raise unless every rank came for this topic."""
        if set(topics.values()) == {topic} and len(topics) == len(self._ranks):
            return
        others = {r: f" came for {other}" for r, other in topics.items() if other != topic}
        absent = [rank for rank in self._ranks if rank not in topics]
        left = self._left(absent)
        broken = any(map(of_a_communicator, left.values()))
        for rank in absent:
            if rank in left:
                others[rank] = f"{self._hellos.where(rank)} has left" + (": " if left[rank] else "")
                others[rank] += left[rank].rstrip(".")
            elif left:  # the wait ended early because of these
                if broken and rank != self._rank:
                    others[rank] = f"{self._hellos.where(rank)} has not come"
            elif rank == self._rank:
                others[rank] = " came too late"
            else:
                others[rank] = f"{self._hellos.where(rank)} did not come within {timeout:g} s"
        if others:
            lines = listed(
                f"{self._hellos.names.one(rank)}{text}" for rank, text in sorted(others.items())
            )
            blamed = {rank for rank in others if not of_a_communicator(left.get(rank, ""))}
            raise RendezvousError(
                f"{self._name!r}, {topic}: {lines}. Every rank must "
                "call it; look at the logs of those ranks.",
                sorted(blamed or others),
            )

    def _left(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return rank -> why it has left, for ranks that have left."""
        found = {}
        with contextlib.suppress(StoreError):  # the store may be gone with the rank that hosts it
            for rank in ranks:
                why = self._store.peek(f"{self._mine.namespace}/bye/{rank}")
                if why is not None:
                    found[rank] = why.decode()
        return found
