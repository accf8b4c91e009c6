"""Run any number of ranks in one process: megapg's real rendezvous code on a counting store.

Each rank is a greenlet with its own clock. The only store serves one call at a time, in the order
of arrival, and each call has a cost. Ranks meet only through the store. A rank therefore runs on
until it makes a call that another rank's call would precede. Sleeping advances the rank's clock and
takes no time.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Self, cast
from unittest import mock

import torch.distributed as dist
from greenlet import getcurrent, greenlet

from megapg.rendezvous import (
    coordinator,
    gathering,
    hello,
    joint_work,
    rendezvous,
    store,
)
from megapg.rendezvous.store import Host, Store

_TIMED = (coordinator, gathering, joint_work, rendezvous, store)
_SPREAD = 1.0
"""Within how many seconds the ranks begin with a phase."""


@dataclass(frozen=True)
class Costs:
    """The costs of a call to the store, in seconds.

    Attributes:
        way: to the store and back, over the network and through the client.
        call: of the process that hosts the store, for each call, and likewise the rest.
        key: for each key that the call names.
        byte: for each byte of values and of keys, both ways.
    """

    way: float = 60e-6
    call: float = 8e-6
    key: float = 0.4e-6
    byte: float = 0.5e-9


@dataclass
class Tally:
    """The store calls of one rank in a phase.

    Attributes:
        calls: calls that changed a key or read one; the others are ``polls``.
        writes: calls that change a key, except for the list of waiting ranks, which depends on
        which ranks are late.
        keys: keys in calls and polls.
        bytes: of keys and values, both ways.
        depth: the longest chain of calls, on any ranks, that each waited for the previous one, and
        that ends here.
        ended: seconds from the first rank's begin to this rank's end.
    """

    calls: int = 0
    polls: int = 0
    writes: int = 0
    keys: int = 0
    bytes: int = 0
    depth: int = 0
    ended: float = 0.0

    def count(self, keys: int, size: int, *, found: bool, writes: bool) -> None:
        """Count a call."""
        self.calls += found
        self.polls += not found
        self.writes += writes
        self.keys += keys
        self.bytes += size


@dataclass
class Phase:
    """The store calls of all ranks in a phase.

    Attributes:
        ranks: by rank.
        busy: seconds for which the store worked.
    """

    ranks: list[Tally]
    busy: float = 0.0

    def most(self, quantity: str, ranks: slice = slice(None)) -> float:
        """Return the maximum of a quantity over the ranks."""
        return max(getattr(each, quantity) for each in self.ranks[ranks])

    def total(self, quantity: str) -> float:
        """Return the sum of a quantity over the ranks."""
        return sum(getattr(each, quantity) for each in self.ranks)


@dataclass
class Rank:
    """A simulated rank: its own clock, and its calls in this phase."""

    rank: int
    at: float = 0.0
    tally: Tally = field(default_factory=Tally)
    run: greenlet | None = None


class Simulation:
    """The ranks, and the store that they share."""

    def __init__(self, size: int, costs: Costs | None = None) -> None:
        self.size, self.costs = size, costs or Costs()
        self.values: dict[str, bytes] = {}
        self._depths: dict[str, int] = {}
        self._arriving: list[tuple[float, int, Rank]] = []
        self._free = self._busy = 0.0
        self._current = Rank(0)
        self._ranks = [Rank(rank) for rank in range(size)]
        self._numbers = iter(range(2**62))

    def store(self) -> Store:
        """Return a connection; each rank must have its own."""
        return _Store(cast("dist.Store", _Keys(self)), Host("the simulated store", here=True))

    def phase(self, part: Callable[[int], object]) -> Phase:
        """Run every rank's part, with begins close to each other, until all are done."""
        begun, order = max(rank.at for rank in self._ranks), random.Random(self.size)
        self._depths.clear()
        self._busy, hub = 0.0, getcurrent()
        for rank in self._ranks:
            rank.at, rank.tally = begun + order.uniform(0.0, _SPREAD), Tally()
            rank.run = greenlet(part, hub)
            self._await(rank)
        gc.disable()  # it would scan the data of all ranks again and again
        with _clock(self):
            while self._arriving:
                self._current = heapq.heappop(self._arriving)[2]
                run = self._current.run
                assert run is not None
                run.switch(*() if run else (self._current.rank,))
        gc.enable()
        for rank in self._ranks:
            rank.tally.ended, rank.run = rank.at - begun, None
        return Phase([rank.tally for rank in self._ranks], self._busy)

    def _await(self, rank: Rank) -> None:
        heapq.heappush(self._arriving, (rank.at, next(self._numbers), rank))

    # -- for the rank that is running ----------------------------------------------------------

    def monotonic(self) -> float:
        """Return the rank's time in seconds."""
        return self._current.at

    def sleep(self, seconds: float) -> None:
        """Advance the rank's clock."""
        self._current.at += seconds

    def reach(self) -> None:
        """Run the ranks whose calls reach the store before a call that this rank makes now."""
        mine = self._current
        mine.at += self.costs.way / 2
        if self._arriving and self._arriving[0][0] < mine.at:
            self._await(mine)
            getcurrent().parent.switch()

    def served(
        self, reads: Sequence[str], writes: Sequence[str], size: int, *, found: bool = True
    ) -> None:
        """Count a call, and advance the clock to its answer."""
        mine, costs = self._current, self.costs
        named = len({*reads, *writes}) or 1
        size += sum(map(len, reads or writes))
        late = any("megapg waiting/" in key for key in writes)
        mine.tally.count(named, size, found=found, writes=bool(writes) and not late)
        if found:
            heard = max((self._depths.get(key, 0) for key in reads), default=0)
            mine.tally.depth = max(mine.tally.depth, heard) + 1
            for key in writes:
                self._depths[key] = max(mine.tally.depth, self._depths.get(key, 0))
        taken = costs.call + costs.key * named + costs.byte * size
        self._busy += taken
        self._free = max(self._free, mine.at) + taken
        mine.at = self._free + costs.way / 2


class _Store(Store):
    def view(self, prefix: str) -> Self:
        keys = cast("_Keys", self._torch)
        return self.beside(cast("dist.Store", keys.inside(prefix)))


class _Keys:
    """A connection with torch's interface, as far as megapg uses it."""

    def __init__(self, simulation: Simulation, prefix: str = "") -> None:
        self._simulation, self._prefix = simulation, prefix

    def inside(self, prefix: str) -> _Keys:
        """Return the connection for the keys with a prefix."""
        return _Keys(self._simulation, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        known = self._reached(keys)
        stored = [value.encode() if isinstance(value, str) else value for value in values]
        self._simulation.values.update(zip(known, stored, strict=True))
        self._simulation.served((), known, sum(map(len, stored)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        (known,) = self._reached([key])
        values = self._simulation.values
        held = values.get(known)
        writes = held == expected.encode() if held is not None else not expected
        if writes:
            values[known] = held = desired.encode()
        answer = expected.encode() if held is None else held
        size = len(expected) + len(desired) + len(answer)
        writing = [known] if writes else []
        self._simulation.served([known], writing, size, found=held is not None)
        return answer

    def check(self, keys: Sequence[str]) -> bool:
        known = self._reached(keys)
        found = all(key in self._simulation.values for key in known)
        self._simulation.served(known, (), 0, found=found)
        return found

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        known = self._reached(keys)
        values = [self._simulation.values[key] for key in known]
        self._simulation.served(known, (), sum(map(len, values)))
        return values

    def add(self, key: str, amount: int) -> int:
        (known,) = self._reached([key])
        values = self._simulation.values
        total = int(values.get(known, b"0")) + amount
        values[known] = str(total).encode()
        # An add does not depend on earlier adds.
        reads, writes = ([], [known]) if amount else ([known], [])
        self._simulation.served(reads, writes, len(values[known]))
        return total

    def delete_key(self, key: str) -> bool:
        (known,) = self._reached([key])
        there = self._simulation.values.pop(known, None) is not None
        self._simulation.served((), [known], 0)
        return there

    def list_keys(self) -> list[str]:
        self._reached(())
        keys = [key for key in self._simulation.values if key.startswith(self._prefix)]
        self._simulation.served((), (), sum(map(len, keys)))
        return [key.removeprefix(self._prefix) for key in keys]

    def _reached(self, keys: Sequence[str]) -> list[str]:
        self._simulation.reach()
        return [self._prefix + key for key in keys]


@contextlib.contextmanager
def _clock(simulation: Simulation) -> Iterator[None]:
    """Make the rendezvous use the clock of the running rank."""
    clock = SimpleNamespace(monotonic=simulation.monotonic, sleep=simulation.sleep)
    process = SimpleNamespace(create_time=float)
    with contextlib.ExitStack() as patches:
        for module in _TIMED:
            patches.enter_context(mock.patch.object(module, "time", clock))
        # The real call for the age of this process reads the file system.
        psutil = SimpleNamespace(Process=lambda: process)
        patches.enter_context(mock.patch.object(hello, "psutil", psutil))
        yield
