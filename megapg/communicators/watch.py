"""Track the progress of all ranks while they connect their communicators in a shared order."""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import override

from megapg.errors import RendezvousError
from megapg.rendezvous.coordinator import SOON, Coordinator
from megapg.rendezvous.error_texts import brief, listed
from megapg.rendezvous.store import StoreError

_T = TypeVar("_T")

# Seconds between two checks of the other ranks' progress.
_LOOK = 0.25


def judge(
    doing: str, owner: str, coordinator: Coordinator, rank: int, problem: str, timeout: float
) -> None:
    """Raise on every rank, with the same reasons, if a rank had an error."""
    known = {} if problem in ("", CALLED_OFF) else {rank: problem}
    with contextlib.suppress(StoreError):  # the exchange raises, with the known errors
        known |= coordinator.posts("problem") if problem else {}
    try:
        heard = coordinator.exchange(f"the end of {doing}", problem, timeout=timeout)
    except RendezvousError as error:
        raise RendezvousError(_failed(doing, owner, known, f" {error}"), error.missing) from None
    if any(heard.values()):
        told = {rank: text for rank, text in heard.items() if text not in ("", CALLED_OFF)}
        raise RendezvousError(_failed(doing, owner, told or known))


def _failed(doing: str, owner: str, problems: Mapping[int, str], more: str = "") -> str:
    lines = listed(f"rank {rank}: {text}" for rank, text in problems.items())
    return f"{owner}: {doing} failed{': ' if lines else ''}{lines}.{more}"


CALLED_OFF = "called off"


class CalledOffError(Exception):
    """Another rank has failed."""


class Watch:
    """Waits as long as any rank makes progress."""

    def __init__(self, coordinator: Coordinator, timeout: float) -> None:
        self._coordinator, self._timeout = coordinator, timeout
        self._steps, self._look_again = -1, 0.0
        self._deadline = time.monotonic() + timeout

    def next(self, events: queue.SimpleQueue[_T]) -> _T:
        """Return the next event of this rank's work."""
        while True:
            try:
                return events.get(timeout=0.02)
            except queue.Empty:
                self._look()

    def advance(self) -> None:
        """Report progress of this rank."""
        self._coordinator.tally("steps", 1)

    def call_off(self, problem: str, *, within: float = SOON) -> None:
        """Tell the other ranks to stop, and why. If the store has failed, they notice it too."""
        with contextlib.suppress(StoreError):
            self._coordinator.post("problem", problem, within=within)
            self._coordinator.tally("failed", 1, within=within)

    def wait_for_all(self) -> None:
        """Wait until every rank is done."""
        self._coordinator.tally("done", 1)
        while self._coordinator.tally("done") < len(self._coordinator.ranks):
            self._look()
            time.sleep(0.02 + len(self._coordinator.ranks) / 5000)

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._look_again:
            return
        self._look_again = now + _LOOK
        if self._coordinator.tally("failed"):
            raise CalledOffError
        steps = self._coordinator.tally("steps")
        if steps != self._steps:
            self._steps, self._deadline = steps, now + self._timeout
        elif now > self._deadline:
            raise TimeoutError(f"no rank got on for {self._timeout:g} s")


@dataclass(frozen=True, order=True)
class Place:
    """A rank's position: a communicator, in the shared order. The start and the end are places too.

    Attributes:
        ranks: the members of the communicator; for another rank's place, only the first eight.
    """

    fields: tuple[str, ...] = ()
    first: int = -1
    name: str = field(default="the start", compare=False)
    ranks: Sequence[int] = field(default=(), compare=False)

    @classmethod
    def read(cls, text: str) -> Place:
        fields, first, name, ranks = json.loads(text)
        return cls(tuple(fields), first, name, ranks)

    @override
    def __str__(self) -> str:
        return json.dumps([self.fields, self.first, self.name, self.ranks[:8]])


THE_START = Place()
THE_END = Place(("~",), name="the end")  # after every field


def told_of(error: Exception, at: Place, doing: str, coordinator: Coordinator) -> str:
    """Describe an error, its communicator, and the ranks that were elsewhere.

    If no rank makes progress, many communicators may wait for one. The cause is the first in the
    shared order, whichever rank has waited longest. If all ranks but one have left a communicator,
    the last has most likely left too and not reported it yet.
    """
    places = dict.fromkeys(coordinator.ranks, at)  # unless the store has posts
    with contextlib.suppress(StoreError):
        said = {rank: Place.read(text) for rank, text in coordinator.posts("at").items()}
        places = dict.fromkeys(coordinator.ranks, THE_START) | said
    reason, suspect = brief(error).splitlines()[0], set(at.ranks)
    if isinstance(error, TimeoutError):
        reason = str(error)
        waited_for = [place for place in places.values() if place > THE_START]
        stuck = [p for p in waited_for if p < THE_END and not _is_left(p, places)]
        earliest = min(stuck or waited_for, default=at)
        at = at if at == earliest else earliest
        suspect = {r for r in places if r in at.ranks or places[r] == THE_START}
    if not at.ranks:
        what, suspect = "not every rank was ready", set(places)
    else:
        what = f"{at.name} {'did not answer' if doing == 'check()' else 'did not open'}"
    elsewhere = [r for r in sorted(suspect) if places[r] != at]
    others = "".join(f"; rank {rank} was at {places[rank].name}" for rank in elsewhere[:8])
    return f"{what}: {reason.rstrip('.')}{others}"


def _is_left(place: Place, places: Mapping[int, Place]) -> bool:
    gone = any(places[rank] > place for rank in place.ranks)
    return gone and sum(places[rank] == place for rank in place.ranks) == 1
