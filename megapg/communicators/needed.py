"""List the communicators that a rank needs, and the fields that share them. Creates nothing.

Needs no torch, so that a plan of a large job takes no second.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeAlias, cast

from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.layout import GroupName, ParallelLayout

ALL_GATHER_FIELDS = frozenset({"dp_cp_ag", "expt_dp_ag"})
_DEDICATED = "dedicated:"
COMPANION = "gloo."
"""Prefix of the fields of gloo companions: ``gloo.dp`` has the ranks of ``dp``."""


_Kind: TypeAlias = tuple[str, CommunicatorOptions, str, timedelta | None]


@dataclass(frozen=True)
class Recipe:
    """The settings of a session's communicators, without their ranks.

    Attributes:
        backend: of the session, as torch names it.
        lanes: field -> lane. Fields on different lanes never share a communicator.
        options: field -> the options of its communicator.
        dedicated: fields that share their communicator with no other field.
        all_gather_groups: True if the fields of :data:`ALL_GATHER_FIELDS` are created.
        gloo: fields that get a gloo companion.
        timeouts: field -> the timeout of its collectives.
    """

    backend: str
    lanes: Mapping[str, str]
    options: Mapping[str, CommunicatorOptions]
    dedicated: frozenset[str]
    all_gather_groups: bool
    gloo: frozenset[str] = frozenset()
    timeouts: Mapping[str, timedelta] = dataclasses.field(default_factory=dict)

    def backend_of(self, field: str) -> str:
        """Return the backend of a field: gloo for a companion, unless the backend has no peers."""
        if field.startswith(COMPANION):
            from megapg.communicators.backends import backend_for  # imports torch

            return self.backend if backend_for(self.backend).alone else "gloo"
        return self.backend

    def lane(self, field: str) -> str:
        """Return the lane of a field. Fields on different lanes never share a communicator."""
        base = field.partition(".")[0]  # levels such as hcp.0 use their field
        return f"{_DEDICATED}{field}" if base in self.dedicated else self.lanes.get(base, "")

    def option(self, field: str) -> CommunicatorOptions:
        """Return the options of a field."""
        return self.options.get(field.partition(".")[0], CommunicatorOptions())

    def timeout(self, field: str) -> timedelta | None:
        """Return the timeout of a field's collectives, or None if none was given for it."""
        return self.timeouts.get(field, self.timeouts.get(field.partition(".")[0]))


@dataclass(frozen=True)
class Communicator:
    """One communicator to create: its ranks, and its fields, which are equal on all of them.

    Attributes:
        fields: the fields that share it, in the collection's order.
        ranks: its global ranks, in the layout's order.
        options: the options for the backend.
        backend: as torch names it.
        timeout: the timeout of its collectives; None for the session's.
    """

    fields: tuple[str, ...]
    ranks: tuple[int, ...]
    options: CommunicatorOptions
    backend: str
    timeout: timedelta | None = None

    @cached_property
    def label(self) -> str:
        """A name that is equal on all ranks of the communicator, and unique in the session."""
        digest = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        return f"{self.fields[0]}-{digest}"


def created_fields(layout: ParallelLayout, recipe: Recipe) -> tuple[GroupName, ...]:
    """Return the families of ``layout`` that a session creates communicators for."""
    left_out = frozenset() if recipe.all_gather_groups else ALL_GATHER_FIELDS
    made = [field for field in layout.families if field not in left_out]
    twins = (cast("GroupName", COMPANION + field) for field in made if field in recipe.gloo)
    return (*made, *twins)


def communicators(layout: ParallelLayout, recipe: Recipe, rank: int) -> list[Communicator]:
    """Return the communicators of ``rank``: one per ranks, lane, options, backend and timeout.

    All ranks of a communicator find the same fields for it, because each family is a partition.
    """
    shared: dict[tuple[tuple[int, ...], _Kind], list[str]] = {}
    for field in created_fields(layout, recipe):
        if ranks := layout.members(_family(field), rank):
            kind = _kind(recipe, field, alone=len(ranks) == 1)
            shared.setdefault((ranks, kind), []).append(field)
    return [
        Communicator(tuple(fields), ranks, options, backend, timeout)
        for (ranks, (_, options, backend, timeout)), fields in shared.items()
    ]


def _family(field: str) -> GroupName:
    return cast("GroupName", field.removeprefix(COMPANION))


def _kind(recipe: Recipe, field: str, *, alone: bool) -> _Kind:
    """Return the properties that fields of the same ranks must share to share a communicator."""
    lane, backend = recipe.lane(field), recipe.backend_of(field)
    if alone and not lane.startswith(_DEDICATED):
        return "alone", CommunicatorOptions(), backend, None  # never communicates
    return lane, recipe.option(field), backend, recipe.timeout(field)


@dataclass(frozen=True)
class Family:
    """The communicators of all ranks for the same fields. A rank is in at most one of them.

    Attributes:
        groups: the global ranks of each communicator.
    """

    fields: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    options: CommunicatorOptions
    backend: str
    timeout: timedelta | None

    def of(self, rank: int) -> Communicator | None:
        """Return the communicator that a rank is in, or None."""
        return next((each for each in self.members if rank in each.ranks), None)

    @property
    def members(self) -> Iterator[Communicator]:
        """All communicators, in the same order on all ranks."""
        for ranks in self.groups:
            yield Communicator(self.fields, ranks, self.options, self.backend, self.timeout)


def families(layout: ParallelLayout, recipe: Recipe) -> list[Family]:
    """Return every communicator of the layout, for a backend on which all ranks create them.

    All ranks find the same families in the same order. Fields share a family if they have the same
    groups on every rank, not on this rank alone.
    """
    shared: dict[tuple[tuple[tuple[int, ...], ...], _Kind], list[str]] = {}
    for field in created_fields(layout, recipe):
        groups = tuple(layout.partition(_family(field)))
        kind = _kind(recipe, field, alone=all(len(ranks) == 1 for ranks in groups))
        shared.setdefault((groups, kind), []).append(field)
    return [
        Family(tuple(fields), groups, options, backend, timeout)
        for (groups, (_, options, backend, timeout)), fields in shared.items()
    ]


def shortened(fields: Sequence[str]) -> str:
    """Format fields for people: the first three."""
    return "+".join(fields[:3]) + ("+..." if len(fields) > 3 else "")
