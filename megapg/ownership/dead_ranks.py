"""Say in which collective a rank failed or was stopped, and which ranks have died."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from megapg.collection import ProcessGroup
from megapg.communicators.needed import Communicator
from megapg.launch.signals import SignalExit
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.error_texts import first, told

logger = logging.getLogger(__name__)

# Seconds to wait for the end of a process that has closed its connections already.
_DYING = 0.2


def of_torch(error: BaseException) -> bool:
    """True if torch raised the error in a collective. Such an error names no rank."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def report(
    title: str,
    error: BaseException,
    groups: Sequence[tuple[Communicator, ProcessGroup]],
    coordinator: Coordinator | None,
) -> None:
    """Name the collective in a note, and log the ranks of this host that have died.

    The log comes before any wait: a launcher stops this process soon after another one died.
    """
    if not (of_torch(error) or isinstance(error, SignalExit)):
        return
    where = next(filter(None, (_collective(frame, groups) for frame in _frames(error))), "")
    if where:
        error.add_note(f"{title}: in {where}.")
    died = {} if coordinator is None else coordinator.died(wait=_DYING)
    if died:
        logger.error("%s: %s%s", title, told(died), f". This rank was in {where}" if where else "")


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Frames from where an error was raised outwards, then of one that a signal interrupted."""
    yield from reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
    if isinstance(error, SignalExit) and (before := error.__context__) is not None:
        yield from reversed([frame for frame, _ in traceback.walk_tb(before.__traceback__)])


def _collective(frame: FrameType, groups: Sequence[tuple[Communicator, ProcessGroup]]) -> str:
    """Return the collective that a frame of torch runs, with the fields of its group."""
    if not str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        return ""
    for communicator, group in groups:
        if frame.f_locals.get("group") is group:
            ranks = first(map(str, communicator.ranks))
            return f"{frame.f_code.co_name} on {first(communicator.fields)} (ranks {ranks})"
    return ""
