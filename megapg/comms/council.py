"""Ranks that are together agree on what to do next: a bounded exchange of words over the store."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from megapg.comms.rollcall import GRACE, Agreement, RollCall
from megapg.errors import RendezvousError

# How often a rank that waits looks whether the one it waits for has left. Seconds.
_LOOK = 0.25


class Council(RollCall):
    """A roll call whose ranks, between :meth:`meet` and :meth:`part`, take counsel any number of
    times. Arguments are those of :class:`~megapg.comms.rollcall.RollCall`.
    """

    _turn = 0

    def meet(self, settings: Mapping[str, str], *, timeout: float, at_least: int = 1) -> Agreement:
        """See :meth:`~megapg.comms.rollcall.RollCall.meet`."""
        agreement = super().meet(settings, timeout=timeout, at_least=at_least)
        self._turn = 0
        return agreement

    def exchange(self, topic: str, said: str, *, timeout: float) -> dict[int, str]:
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
        before = f"{self._mine.namespace}/turn {self._turn - 1}"
        self._turn += 1
        deadline = time.monotonic() + timeout
        with self._reaching_the_store():
            self._store.set(f"{folder}/{self._rank}", json.dumps([topic, said]))
            if self._leading:
                everyone = [f"{folder}/{rank}" for rank in self._ranks]
                self._wait(everyone, deadline)
                heard = self._settle(f"{folder}/all", self._answers(folder, ""))
                if len(heard) == len(self._ranks):  # so everyone has heard what was said before
                    for rank in (*self._ranks, "all"):
                        self._store.delete_key(f"{before}/{rank}")
            elif self._wait([f"{folder}/all"], deadline + GRACE):
                heard = self._read_problems(f"{folder}/all")
            else:
                heard = self._answers(folder, "")
                heard.pop(self._ranks[0], None)  # it was to tell us
                heard = self._settle(f"{folder}/all", heard)
            self._check(topic, heard, timeout)
        return {rank: json.loads(text)[1] for rank, text in heard.items()}

    def _wait(self, keys: Sequence[str], deadline: float) -> bool:
        """Whether the keys are there by the deadline; it ends early if somebody has left."""
        look_again = time.monotonic() + _LOOK
        arrived = False

        def here_or_hopeless() -> bool:
            nonlocal look_again, arrived
            arrived = self._store.check(list(keys))
            if arrived or time.monotonic() < look_again:
                return arrived
            look_again = time.monotonic() + _LOOK
            awaited = self._ranks if self._leading else self._ranks[:1]
            return any(self._has_left(rank) for rank in awaited)

        self._until(here_or_hopeless, deadline)
        return arrived or self._store.check(list(keys))

    def _has_left(self, rank: int) -> bool:
        return self._peek(f"{self._mine.namespace}/bye/{rank}") is not None

    def _check(self, topic: str, heard: Mapping[int, str], timeout: float) -> None:
        others = {}
        for rank in self._ranks:
            if rank not in heard:
                late = rank == self._rank
                others[rank] = " came too late" if late else self._absent(rank, timeout)
            elif (theirs := json.loads(heard[rank])[0]) != topic:
                others[rank] = f" came for {theirs}"
        if others:
            lines = [f"rank {rank}{text}" for rank, text in list(others.items())[:8]]
            more = f"; and {len(others) - 8} more" if len(others) > 8 else ""
            raise RendezvousError(
                f"{self._name!r}, {topic}: {'; '.join(lines)}{more}. Every rank must "
                "call it; look at the logs of those ranks.",
                sorted(others),
            )

    def _absent(self, rank: int, timeout: float) -> str:
        try:
            hello = self._hello(rank)
            left = self._peek(f"{self._mine.namespace}/bye/{rank}")
        except dist.DistError:  # the store may go with the rank
            hello = left = None
        where = self._where(rank, hello)
        if left is None:
            return f"{where} did not come within {timeout:g} s"
        why = left.decode().rstrip(".")
        return f"{where} has left" + (f": {why}" if why else "")
