"""Connect communicators before they are needed, in one order that all ranks share.

A communicator connects at its first use. NCCL creates it then, and creates communicators of two
ranks for sends without batching. gloo connects each pair of ranks when the two first communicate.
If this happens in the middle of a training step, a missing rank is noticed late (gloo tries five
times), and memory is taken unexpectedly. Ranks that begin with different groups deadlock.

Here every rank connects its communicators sorted by fields and ranks. The first one in this order
that is not connected waits for no other communicator on any rank, so there is no deadlock.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from typing_extensions import override

from megapg.communicators.backends import rows_of
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import Communicator, shortened
from megapg.communicators.watch import (
    CALLED_OFF,
    THE_END,
    THE_START,
    CalledOffError,
    Place,
    Watch,
    judge,
    told_of,
)
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.error_texts import brief

# On gloo, connect each pair of up to so many ranks. With more ranks, only pairs that collectives
# use.
_LARGEST = 64
# Seconds that notifying the other ranks may take after Ctrl-C.
_INTERRUPTED_WAIT = 1.0
# Seconds to wait for a thread that is stuck in a communicator.
_JOIN_WAIT = 1.0
# The fields that use all-to-all besides other collectives.
_ALL_TO_ALL = frozenset({"cp", "ep", "tp_ep"})
_PIPELINE = "pp"


@dataclass(frozen=True)
class Opened:
    """One communicator that a warm-up has connected.

    Attributes:
        fields: its fields. ``WORLD`` stands for WORLD, or for the part of it that pipelines of two
            ranks use.
        ranks: its global ranks.
        backend: as torch names it.
        seconds: the duration, including the wait for the other ranks.
        bytes: by how much the free memory of the device shrank, counting all processes; None if the
            communicator is not on a device.
    """

    fields: tuple[str, ...]
    ranks: tuple[int, ...]
    backend: str
    seconds: float
    bytes: int | None


@dataclass(frozen=True)
class WarmUpReport:
    """The communicators that a warm-up connected on this rank. ``str()`` is a table for people.

    Attributes:
        owner: the owner of the communicators.
        communicators: in the order of connection, without those of one rank.
        seconds: the duration, until every rank was done.
    """

    owner: str
    communicators: tuple[Opened, ...]
    seconds: float

    @property
    def bytes(self) -> int | None:
        """By how much the free memory of the device shrank; None if no communicator is on one."""
        known = [each.bytes for each in self.communicators if each.bytes is not None]
        return sum(known) if known else None

    @override
    def __str__(self) -> str:
        count = len(self.communicators)
        lines = [
            f"{self.owner}: {count} communicator{'s' if count != 1 else ''} opened in "
            f"{self.seconds:.3f} s"
            + (f", {self.bytes / 2**20:,.1f} MiB" if self.bytes is not None else "")
        ]
        rows = [
            (
                shortened(each.fields),
                f"ranks {_listed(each.ranks)}",
                each.backend,
                f"{each.seconds:.3f} s",
                "" if each.bytes is None else f"{each.bytes / 2**20:,.1f} MiB",
            )
            for each in self.communicators
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n  ".join(lines)


@dataclass(frozen=True)
class HealthReport:
    """The result of a successful check: every rank responded. ``str()`` is for people.

    Attributes:
        owner: the owner of the groups.
        reason: the reason that the caller gave.
        ranks: the global ranks that responded.
        seconds: the duration, including the wait for the other ranks.
        communicators: the communicators that responded, in the order of the check, each with its
            own ``seconds``. Empty unless requested.
    """

    owner: str
    reason: str
    ranks: tuple[int, ...]
    seconds: float
    communicators: tuple[Opened, ...] = ()

    @override
    def __str__(self) -> str:
        lines = [
            f"{self.owner}: {len(self.ranks)} rank{'s' if len(self.ranks) != 1 else ''} answered "
            f"within {self.seconds:.3f} s" + (f" ({self.reason})" if self.reason else "")
        ]
        lines += [f"  {'+'.join(c.fields)}: {c.seconds:.3f} s" for c in self.communicators]
        return "\n".join(lines)


def warm_up(
    owner: str,
    made: Iterable[tuple[Communicator, dist.ProcessGroup]],
    coordinator: Coordinator,
    rank: int,
    *,
    timeout: float,
    unbatched: bool,
) -> WarmUpReport:
    """Connect the communicators of this rank. Every rank calls it with its share of them.

    Args:
        owner: the owner of the communicators, for messages.
        made: the communicators that this rank is in.
        coordinator: the coordinator of all ranks that call this.
        rank: this rank.
        timeout: fail after so many seconds without progress on any rank.
        unbatched: True if pipelines send without batching, as Megatron's interleaved schedule does.
            NCCL then creates more communicators. gloo connects these pairs anyway.

    Raises:
        RendezvousError: a communicator did not connect, or a rank did not arrive. The error names
            fields and ranks on every rank. The communicators must not be used any more.
    """
    steps = _steps(made, rank, unbatched=unbatched)
    opened, seconds = _together("warm_up()", owner, steps, coordinator, rank, timeout)
    return WarmUpReport(owner, opened, seconds)


def probe(
    owner: str,
    made: Iterable[tuple[Communicator, dist.ProcessGroup]],
    coordinator: Coordinator,
    rank: int,
    *,
    timeout: float,
) -> tuple[Opened, ...]:
    """Run one small collective on each communicator of this rank; see :func:`warm_up`."""
    steps = [
        replace(step, probe=True) for step in _steps(made, rank, unbatched=False) if step.whole
    ]
    return _together("check()", owner, steps, coordinator, rank, timeout)[0]


def _together(
    doing: str,
    owner: str,
    steps: Sequence[_Step],
    coordinator: Coordinator,
    rank: int,
    timeout: float,
) -> tuple[tuple[Opened, ...], float]:
    """Take the steps in order, and wait until every rank is done. Return results and duration."""
    coordinator.exchange(doing, "", timeout=timeout)  # all ranks start together
    started = time.perf_counter()
    watch = Watch(coordinator, timeout)
    work = _Work(steps, rank, timeout)
    opened: list[Opened] = []
    at, problem = THE_START, ""
    try:
        while (event := watch.next(work.events)) is not None:
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Opened):
                opened.append(event)
                watch.advance()
            else:
                at = event.place
                coordinator.post("at", str(at))
        at = THE_END
        coordinator.post("at", str(at))
        watch.wait_for_all()
    except CalledOffError:
        problem = CALLED_OFF
    except Exception as error:
        problem = told_of(error, at, doing, coordinator)
        watch.call_off(problem)
    except BaseException as error:
        watch.call_off(brief(error), within=_INTERRUPTED_WAIT)
        raise
    finally:
        work.stop()
    judge(doing, owner, coordinator, rank, problem, timeout)
    return tuple(opened), time.perf_counter() - started


# -- opening ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A communicator to connect.

    Attributes:
        communicator: the communicator.
        group: its group in torch.
        pairs: global ranks that send to each other without batching, in the same order on all
            ranks.
        whole: False to connect only ``pairs``.
        probe: True to run only one small collective.
    """

    communicator: Communicator
    group: dist.ProcessGroup
    pairs: Sequence[tuple[int, int]] = ()
    whole: bool = True
    probe: bool = False

    @property
    def place(self) -> Place:
        fields, ranks = self.communicator.fields, self.communicator.ranks
        return Place(fields, ranks[0], f"{shortened(fields)} of ranks {_listed(ranks)}", ranks)


_Event: TypeAlias = _Step | Opened | BaseException | None
_Devices: TypeAlias = list[tuple[str, torch.device]]


def _steps(
    made: Iterable[tuple[Communicator, dist.ProcessGroup]], rank: int, *, unbatched: bool
) -> list[_Step]:
    """Return the steps of this rank, in an order that all ranks share."""
    found = []
    made = list(made)
    whole = any(group is dist.group.WORLD for _, group in made)
    for communicator, group in made:
        ranks = communicator.ranks
        if len(ranks) == 1:
            continue
        pairs: list[tuple[int, int]] = []
        free = not any(row.holds_memory for row in rows_of(communicator.backend))
        if (unbatched or free) and _PIPELINE in communicator.fields:
            ring = {tuple(sorted(pair)) for pair in zip(ranks, (*ranks[1:], ranks[0]), strict=True)}
            pairs = sorted((low, high) for low, high in ring if rank in (low, high))
            world = dist.group.WORLD
            if len(ranks) == 2 and world is not None and not (whole and free):
                # With two ranks, Megatron sends one way over the group and the other way over
                # WORLD.
                named = Communicator(
                    ("WORLD",), ranks, CommunicatorOptions(), dist.get_backend(world)
                )
                found.append(_Step(named, world, pairs, whole=False))
        found.append(_Step(communicator, group, pairs))
    return sorted(found, key=lambda step: (step.communicator.fields, step.communicator.ranks))


class _Work:
    """A thread that takes the steps in order, because a step can block in C++ for any time.

    Attributes:
        events: a step when it begins, its result, an error that ends the work, None at the end.
    """

    def __init__(self, steps: Sequence[_Step], rank: int, timeout: float) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._timeout = timedelta(seconds=timeout)
        # The current device is per thread, and a new thread starts with the first device.
        placed = [(step, _devices(step.group)) for step in steps]
        self._thread = threading.Thread(
            target=self._run, args=(placed, rank), daemon=True, name="megapg warm-up"
        )
        self._thread.start()

    def stop(self) -> None:
        """Begin no further step, and wait for the thread for a moment."""
        self._stopped.set()
        self._thread.join(_JOIN_WAIT)
        if self._thread.is_alive():
            # A thread that returns from C++ while the interpreter exits ends the process with
            # SIGABRT.
            atexit.register(self._thread.join, _JOIN_WAIT)

    def _run(self, placed: Sequence[tuple[_Step, _Devices]], rank: int) -> None:
        try:
            for step, devices in placed:
                if self._stopped.is_set():
                    return
                self.events.put(step)
                self.events.put(self._opened(step, devices, rank))
            self.events.put(None)
        except BaseException as error:
            self.events.put(error)

    def _opened(self, step: _Step, devices: _Devices, rank: int) -> Opened:
        communicator = step.communicator
        before, started = None, time.perf_counter()
        for name, device in devices:
            if device.type == "cuda" and before is None:
                torch.cuda.set_device(device)
                before = torch.cuda.mem_get_info(device)[0]
            for begun in _begun(name, device, step, rank, self._timeout):
                self._wait(begun)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        taken = None if before is None else before - torch.cuda.mem_get_info()[0]
        seconds = time.perf_counter() - started
        return Opened(communicator.fields, communicator.ranks, communicator.backend, seconds, taken)

    def _wait(self, work: dist.Work | None) -> None:
        """Poll until the work is done or stop() was called. A wait in C++ would not see stop()."""
        pause = 0.0
        while work is not None and not work.is_completed():
            if self._stopped.wait(pause):
                raise CalledOffError
            pause = min(pause + 0.0005, 0.01)
        if work is not None:
            work.wait()


def _devices(group: dist.ProcessGroup) -> _Devices:
    """Return the backends of a group, each once, with a device of this thread."""
    found: dict[str, torch.device] = {}
    for spelled in dist.get_backend_config(group).split(","):
        kind, _, name = spelled.partition(":")
        for row in rows_of(name):
            on_gpu = kind == "cuda" and row.holds_memory
            device = f"cuda:{torch.cuda.current_device()}" if on_gpu else kind
            found.setdefault(row.name, torch.device(device))
    return list(found.items())


def _begun(
    backend: str, device: torch.device, step: _Step, rank: int, timeout: timedelta
) -> Iterator[dist.Work | None]:
    """Start, one after the other, operations that connect all that training will use."""
    group, ranks = step.group, step.communicator.ranks
    count, gloo = len(ranks), backend == "gloo"
    if step.whole:
        yield dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
        if step.probe:
            return
        if count <= _LARGEST if gloo else _ALL_TO_ALL & set(step.communicator.fields):
            sent, received = torch.zeros(2, count, device=device).unbind()
            yield dist.all_to_all_single(received, sent, group=group, async_op=True)
        elif gloo:
            one, all_of_them = torch.zeros(1), torch.zeros(count)
            yield dist.all_gather_into_tensor(all_of_them, one, group=group, async_op=True)
            yield dist.broadcast(one, ranks[0], group=group, async_op=True)
            yield dist.barrier(group=group, async_op=True)
        if not gloo and _PIPELINE in step.communicator.fields:
            at = ranks.index(rank)
            after, before = ranks[(at + 1) % count], ranks[at - 1]
            sent, received = torch.zeros(2, 1, device=device).unbind()
            yield from dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, after, group),
                    dist.P2POp(dist.irecv, received, before, group),
                ]
            )
    if step.whole and gloo:
        return  # each pair is connected already
    for low, high in step.pairs:
        sent, received = torch.zeros(2, 1, device=device).unbind()
        if rank == low:
            works = dist.isend(sent, high, group=group), dist.irecv(received, high, group=group)
        else:
            works = dist.irecv(received, low, group=group), dist.isend(sent, low, group=group)
        for work in works:  # gloo's work is done only after wait()
            if work is not None:
                work.wait(timeout)


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
