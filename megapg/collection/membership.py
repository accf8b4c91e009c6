"""This rank's place in a process group, as far as torch knows the group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

from megapg.errors import ForeignGroupError

ProcessGroup: TypeAlias = dist.ProcessGroup


@dataclass(frozen=True)
class Membership:
    """One group seen from this rank, as plain values: its global ranks and our index in them."""

    rank: int
    ranks: tuple[int, ...]


def membership(field: str, group: ProcessGroup) -> Membership:
    """This rank's place in a group that torch knows; ``field`` is for the error.

    Raises:
        ForeignGroupError: torch does not know it, or this rank is not in it.
    """
    try:  # not the group itself: a destroyed gloo group still answers
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError) as error:
        raise _unknown_to_torch(field) from error
    me = dist.get_rank()
    if me not in ranks:
        raise ForeignGroupError(f"{field}: rank {me} is not in this group of ranks {ranks}.")
    return Membership(ranks.index(me), ranks)


def known_ranks(group: object) -> tuple[int, ...]:
    """Global ranks; empty for no group, and for one that torch does not know any more."""
    if not isinstance(group, ProcessGroup):  # torch would take None for WORLD
        return ()
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return ()


def check_registered(owner: str, field: str, group: ProcessGroup) -> None:
    """Raise unless torch knows the group, at a cost that does not grow with it.

    Raises:
        ForeignGroupError: it does not.
    """
    try:
        dist.get_global_rank(group, 0)
    except (KeyError, ValueError, RuntimeError) as error:
        raise _unknown_to_torch(f"{owner}: {field}") from error


def _unknown_to_torch(purpose: str) -> ForeignGroupError:
    return ForeignGroupError(
        f"{purpose}: torch.distributed does not know this process group; it was destroyed, or "
        "WORLD was re-created since."
    )
