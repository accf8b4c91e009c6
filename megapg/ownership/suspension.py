"""Release the memory of communicators for a while: the ways to do it, and their steps.

There are three ways, from the least to the most disruptive:

* **suspend**: the communicators release their device memory (NCCL 2.29.7 and later, through torch
  2.13 and later). Handles, names and connections stay valid.
* **recreate**: the groups are destroyed, and created again on resume. Code that holds a group needs
  the new one.
* **recreate world**: as *recreate*, and WORLD as well if megapg made it.

The owner of the groups decides when to suspend.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeAlias, cast, get_args

import torch
import torch.distributed as dist
from typing_extensions import override

from megapg import torch_private
from megapg.communicators.backends import rows_of
from megapg.communicators.needed import Communicator
from megapg.errors import OffloadError, UnsupportedOffloadError
from megapg.ownership.steps import Steps
from megapg.rendezvous.call_in_thread import bounded

How: TypeAlias = Literal["suspend", "recreate", "recreate world"]
"""The ways; see the module's docstring."""

WAYS: tuple[How, ...] = get_args(How)
# Default ways, in this order. WORLD is re-created only on request.
_DEFAULT_WAYS: tuple[How, ...] = ("suspend", "recreate")

Groups: TypeAlias = Sequence[tuple[Communicator, dist.ProcessGroup]]


@dataclass(frozen=True)
class OffloadReport:
    """The effect of suspending or resuming on this rank. ``str()`` is for people.

    Attributes:
        action: ``"suspended"`` or ``"resumed"``.
        owner: the owner of the groups.
        how: the way that all ranks took.
        communicators: the number of communicators that this rank is in.
        groups_gone: by how much torch's registry of groups has shrunk; negative if it has grown.
        bytes: backend -> bytes of device memory that its communicators held before and after; None
            if the backend cannot tell.
        free: free bytes of the device before and after, counting all processes; None without a
            device.
        seconds: step -> seconds, in order.
    """

    action: str
    owner: str
    how: How
    communicators: int
    groups_gone: int
    bytes: Mapping[str, tuple[int | None, int | None]]
    free: tuple[int | None, int | None]
    seconds: Mapping[str, float]

    @override
    def __str__(self) -> str:
        registry = f"{abs(self.groups_gone)} groups {'left' if self.groups_gone > 0 else 'entered'}"
        lines = [
            f"{self.owner}: {self.communicators} communicators "
            f"{self.action} by {self.how} in {sum(self.seconds.values()):.3f} s"
            + (f"; {registry} torch's registry" if self.groups_gone else "")
        ]
        for name, (before, after) in {**self.bytes, "free on the device": self.free}.items():
            if (before, after) != (None, None):
                lines.append(f"  {name}: {_size(before)} before, {_size(after)} after")
            elif name in self.bytes:
                lines.append(f"  {name}: memory unknown")
        steps = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in self.seconds.items())
        return "\n".join([*lines, f"  {steps}"])


# -- which way -----------------------------------------------------------------------------------


def cannot_suspend(backends: Iterable[str]) -> str:
    """Return why communicators of these backends can't be suspended here; empty if they can.

    Checks only versions and the environment. :func:`refusal` checks live communicators.

    Args:
        backends: as torch spells them, ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    rows = {row.name: row for spelling in backends for row in rows_of(spelling)}
    reasons = {name: row.cannot_suspend() for name, row in rows.items() if row.holds_memory}
    if not reasons:
        return f"{', '.join(sorted(rows)) or 'no group'} keeps no memory that could be suspended"
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)


def refusal(groups: Groups) -> str:
    """Return why these communicators can't be suspended; empty if they can. Changes nothing."""
    if reason := cannot_suspend(communicator.backend for communicator, _ in groups):
        return reason
    for communicator, group in groups:
        for name, part in _parts(group):
            try:
                part.memory_stats()  # a build that has memory_stats() has suspend()
            except RuntimeError as error:
                return f"{name} of {', '.join(communicator.fields)}: {str(error).splitlines()[0]}"
    return ""


def capturing() -> str:
    """Return why nothing may be suspended now, if a CUDA graph is being captured; else empty."""
    if _on_cuda() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured; suspend before or after"
    return ""


def wish(asked: How | None, cannot: Mapping[How, str]) -> str:
    """Encode what this rank asks for and what it can't do, for :func:`agreed`.

    Args:
        asked: the way to take; None for *suspend* if every rank can, else *recreate*.
        cannot: way -> why this rank can't take it, or empty.
    """
    # may be any object; agreed() refuses it
    asked = None if asked is None else cast("How", str(asked))
    return json.dumps({"asked": asked, "cannot": cannot})


def agreed(owner: str, heard: Mapping[int, str]) -> How:
    """Return the way that every rank can take. It is the same on all ranks. Changes nothing.

    Args:
        owner: the owner of the groups, for the message.
        heard: rank -> its :func:`wish`.

    Raises:
        UnsupportedOffloadError: some ranks can't, or the ranks asked for different ways.
    """
    said = {rank: json.loads(text) for rank, text in heard.items()}
    by_asked = _ranks_by({rank: f"how={answer['asked']!r}" for rank, answer in said.items()})
    if len(by_asked) > 1:
        raise UnsupportedOffloadError(
            f"{owner}: the ranks asked for different ways, {_told(by_asked)}. Give every rank the "
            "same how=. Nothing was touched."
        )
    asked = next(iter(said.values()))["asked"]
    unknown = f"there is no such way; the ways are {', '.join(WAYS)}"
    refusals = []
    for way in _DEFAULT_WAYS if asked is None else (asked,):
        reasons = {rank: answer["cannot"].get(way, unknown) for rank, answer in said.items()}
        if not any(reasons.values()):
            return way
        refusals.append(f"not by {way!r}, since {_told(_ranks_by(reasons))}")
    raise UnsupportedOffloadError(
        f"{owner} can't be suspended: {', '.join(refusals)}. Nothing was touched."
    )


def _ranks_by(values: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        if value:
            found.setdefault(value, []).append(rank)
    return found


def _told(ranks_by: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(
        f"{value} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        + (" and more)" if len(ranks) > 8 else ")")
        for value, ranks in ranks_by.items()
    )


# -- suspending ----------------------------------------------------------------------------------


def suspend(groups: Groups) -> None:
    """Suspend the communicators that hold device memory, in the order of creation.

    Every rank calls it with its share of the same groups, after the device has finished.

    Raises:
        OffloadError: some failed; every one was attempted. Notes name fields and ranks.
    """
    _each(groups, "suspending", lambda part: part.suspend())


def resume(groups: Groups) -> None:
    """Resume communicators after :func:`suspend`, in the same order and with the same errors."""
    _each(groups, "resuming", lambda part: part.resume())


def synchronize(within: float = math.inf) -> None:
    """Wait until the device has done all its work.

    Raises:
        TimeoutError: it has not, ``within`` so many seconds. Usually a collective waits for a rank
            that does not come.
    """
    if not _on_cuda():
        return
    if within == math.inf:
        torch.cuda.synchronize()
        return
    device = torch.cuda.current_device()  # the current device is per thread
    work = partial(torch.cuda.synchronize, device)
    bounded(work, time.monotonic() + within, name="megapg synchronize")


class _Suspendable(Protocol):
    """Methods of torch's backends since 2.13, which torch's stubs do not list."""

    def suspend(self) -> None: ...
    def resume(self) -> None: ...
    def memory_stats(self) -> dict[str, int]: ...


def _each(groups: Groups, doing: str, do: Callable[[_Suspendable], None]) -> None:
    problems: list[Exception] = []
    for communicator, group in groups:
        for _, part in _parts(group):
            try:
                do(part)
            except Exception as error:
                fields = ", ".join(communicator.fields)
                error.add_note(f"{doing} {fields} of ranks {communicator.ranks}")
                problems.append(error)
    if problems:
        raise OffloadError(f"{doing} {len(problems)} communicators failed", problems)


def _parts(group: dist.ProcessGroup) -> Iterator[tuple[str, _Suspendable]]:
    """Yield name and backend for each connected backend of a group that holds device memory."""
    seen = set()
    for spelled in dist.get_backend_config(group).split(","):
        device, _, name = spelled.partition(":")
        for row in rows_of(name):
            if row.holds_memory:
                part = torch_private.backend_on(group, torch.device(device))
                if part not in seen and not row.unused(part):
                    seen.add(part)
                    yield row.name, cast("_Suspendable", part)


# -- what it brings ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """Resources that communicators use at one moment; see :class:`OffloadReport` for the units."""

    communicators: int
    held: Mapping[str, int | None]
    free: int | None
    registered: int

    @classmethod
    def of(cls, groups: Groups) -> Usage:
        """Measure these communicators now."""
        free = torch.cuda.mem_get_info()[0] if _on_cuda() else None
        return cls(len(groups), _held(groups), free, len(torch_private.known_groups()))


def report(
    owner: str, action: str, how: How, before: Usage, after: Usage, steps: Steps
) -> OffloadReport:
    """Report the difference between two measurements."""
    names = {**before.held, **after.held}
    return OffloadReport(
        action=action,
        owner=owner,
        how=how,
        communicators=max(before.communicators, after.communicators),
        groups_gone=before.registered - after.registered,
        bytes={name: (before.held.get(name), after.held.get(name)) for name in names},
        free=(before.free, after.free),
        seconds=dict(steps.seconds),
    )


def _held(groups: Groups) -> dict[str, int | None]:
    """Return backend -> bytes of device memory of its communicators; None if it can't tell."""
    found: dict[str, int | None] = {}
    for communicator, group in groups:
        for row in rows_of(communicator.backend):
            found.setdefault(row.name, 0 if row.holds_memory else None)
        for name, part in _parts(group):
            so_far = found[name]
            try:
                found[name] = None if so_far is None else so_far + _resident(part.memory_stats())
            except (RuntimeError, AttributeError, KeyError):  # an older torch or NCCL
                found[name] = None
    return found


def _resident(stats: Mapping[str, int]) -> int:
    # NCCL's "total" does not change on suspend. "suspend" is the part that can be released, and
    # "suspended" tells if it has been.
    return stats["persist"] if stats["suspended"] else stats["total"]


def _on_cuda() -> bool:
    """True if this process uses CUDA. Without CUDA, torch's other queries raise."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count} bytes"
