"""Giving the memory of communicators back for a while: which ways there are, and their parts.

Three ways, from the gentlest:

* **suspend**: the communicators themselves let go of their device memory (NCCL 2.29.7 and later,
  through torch 2.13 and later). Handles, names and connections stay valid.
* **recreate**: the groups are destroyed, and made anew afterwards. Whoever holds one needs the new.
* **recreate world**: WORLD goes as well, if it is megapg's own.

Nothing here decides when: that is for the owner of the groups.
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

from megapg import torch_private
from megapg.communicators.backends import rows_of
from megapg.communicators.plan import Communicator
from megapg.errors import OffloadError, UnsupportedOffloadError
from megapg.ownership.steps import Steps
from megapg.rendezvous.bounded import bounded

How: TypeAlias = Literal["suspend", "recreate", "recreate world"]
"""The ways; see the module's docstring."""

WAYS: tuple[How, ...] = get_args(How)
# What is taken unless somebody asks: WORLD is only ever re-created on request.
_BY_ITSELF: tuple[How, ...] = ("suspend", "recreate")

Groups: TypeAlias = Sequence[tuple[Communicator, dist.ProcessGroup]]


@dataclass(frozen=True)
class OffloadReport:
    """What suspending, or resuming, did on this rank. ``str()`` is for people.

    Attributes:
        action: ``"suspended"`` or ``"resumed"``.
        owner: whose groups.
        how: the way that all ranks took.
        communicators: how many this rank is in.
        groups_gone: by how much torch's registry of groups has shrunk; negative if it has grown.
        bytes: backend -> bytes of device memory its communicators held before and after, None
            where the backend cannot tell.
        free: free bytes of the device before and after, whoever took or freed them; None without
            one.
        seconds: step -> how long it took, in order.
    """

    action: str
    owner: str
    how: How
    communicators: int
    groups_gone: int
    bytes: Mapping[str, tuple[int | None, int | None]]
    free: tuple[int | None, int | None]
    seconds: Mapping[str, float]

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
    """Why communicators of these backends can't be suspended in this process; empty if they can.

    Asks versions and the environment alone; of live ones :func:`refusal` knows more.

    Args:
        backends: as torch spells them, ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
    """
    rows = {row.name: row for spelling in backends for row in rows_of(spelling)}
    reasons = {name: row.cannot_suspend() for name, row in rows.items() if row.holds_memory}
    if not reasons:
        return f"{', '.join(sorted(rows)) or 'no group'} keeps no memory that could be suspended"
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)


def refusal(groups: Groups) -> str:
    """Why these communicators can't be suspended; empty if they can. Nothing is changed by it."""
    if reason := cannot_suspend(communicator.backend for communicator, _ in groups):
        return reason
    for communicator, group in groups:
        for name, part in _parts(group):
            try:
                part.memory_stats()  # where this works, what it was built with can suspend as well
            except RuntimeError as error:
                return f"{name} of {', '.join(communicator.fields)}: {str(error).splitlines()[0]}"
    return ""


def capturing() -> str:
    """Why nothing may be suspended at this moment, if a CUDA graph is being captured."""
    if _on_cuda() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured; suspend before or after"
    return ""


def wish(asked: How | None, cannot: Mapping[How, str]) -> str:
    """What a rank says before anything is suspended, for :func:`agreed`.

    Args:
        asked: the way to take; by itself *suspend* where every rank can, else *recreate*.
        cannot: way -> why this rank can't take it, or empty.
    """
    asked = None if asked is None else cast("How", str(asked))  # whatever it is, it is told
    return json.dumps({"asked": asked, "cannot": cannot})


def agreed(owner: str, heard: Mapping[int, str]) -> How:
    """The way that every rank can take, the same on all of them. Nothing is touched yet.

    Args:
        owner: whose groups, for the message.
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
    for way in _BY_ITSELF if asked is None else (asked,):
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
    """Suspend the communicators that hold device memory, in the order in which they were made.

    Every rank calls it with its share of the same groups, after the device has finished.

    Raises:
        OffloadError: some could not be; every one was attempted. Notes name fields and ranks.
    """
    _each(groups, "suspending", lambda part: part.suspend())


def resume(groups: Groups) -> None:
    """The opposite of :func:`suspend`, in the same order and with the same errors."""
    _each(groups, "resuming", lambda part: part.resume())


def synchronize(within: float = math.inf) -> None:
    """Wait until the device has done all it was asked to.

    Raises:
        TimeoutError: it has not ``within`` so many seconds; a collective waits for somebody who
            does not come.
    """
    if not _on_cuda():
        return
    if within == math.inf:
        torch.cuda.synchronize()
        return
    device = torch.cuda.current_device()  # each thread has one of its own
    work = partial(torch.cuda.synchronize, device)
    bounded(work, time.monotonic() + within, name="megapg synchronize")


class _Suspendable(Protocol):
    """What torch's backends have from 2.13 on, and its stubs do not show."""

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
    """The connected backends behind a group that hold device memory, by name, each once."""
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
    """What communicators take at one moment; see :class:`OffloadReport` for the units."""

    communicators: int
    held: Mapping[str, int | None]
    free: int | None
    registered: int

    @classmethod
    def of(cls, groups: Groups) -> Usage:
        """What these take now."""
        free = torch.cuda.mem_get_info()[0] if _on_cuda() else None
        return cls(len(groups), _held(groups), free, len(torch_private.known_groups()))


def report(
    owner: str, action: str, how: How, before: Usage, after: Usage, steps: Steps
) -> OffloadReport:
    """What the steps between two moments brought."""
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
    """Backend -> bytes of device memory that its communicators hold; None where it can't tell."""
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
    # As NCCL counts: the total stays while "suspend", the part that can be given back, is away,
    # and "suspended" says whether it is.
    return stats["persist"] if stats["suspended"] else stats["total"]


def _on_cuda() -> bool:
    """Whether this process uses CUDA; torch without it has no answer to further questions."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return in_use


def _size(count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count} bytes"
