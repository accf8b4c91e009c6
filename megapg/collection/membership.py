"""This rank's membership in a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch.distributed as dist

from megapg.errors import ForeignGroupError

ProcessGroup: TypeAlias = dist.ProcessGroup


@dataclass(frozen=True)
class Membership:
    """This rank's membership in one group: its index, and the global ranks of the group."""

    rank: int
    ranks: tuple[int, ...]


def membership(field: str, group: ProcessGroup) -> Membership:
    """Return this rank's membership in a group; ``field`` is for the error.

    Raises:
        ForeignGroupError: torch does not know the group, or this rank is not in it.
    """
    try:  # ask torch, not the group: a destroyed gloo group still answers
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError) as error:
        raise _unknown_to_torch(field) from error
    me = dist.get_rank()
    if me not in ranks:
        raise ForeignGroupError(f"{field}: rank {me} is not in this group of ranks {ranks}.")
    return Membership(ranks.index(me), ranks)


def known_ranks(group: object) -> tuple[int, ...]:
    """Return the global ranks of a group; empty for None or a group unknown to torch."""
    if not isinstance(group, ProcessGroup):  # torch would take None for WORLD
        return ()
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return ()


def check_registered(owner: str, field: str, group: ProcessGroup) -> None:
    """Raise unless torch knows the group. The cost does not depend on the group's size.

    Raises:
        ForeignGroupError: torch does not know the group.
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
