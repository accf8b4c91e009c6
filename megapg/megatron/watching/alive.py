"""The layouts that are alive in this process, and the fields on which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from megapg.collection import LeaseState
from megapg.collection.membership import known_ranks
from megapg.megatron.core import globals_of_core
from megapg.megatron.publish import hidden_by_published
from megapg.megatron.tables import ALWAYS_SET, HOLDS
from megapg.ownership.closing import open_owners

Ranks: TypeAlias = tuple[int, ...]
"""Global ranks of one group. Empty if this rank is outside; for ``hcp`` all levels in a row."""

# Fields whose global is None on ranks that are in no such group.
_OUTSIDE = ("embd", "pos_embd")

NUMBERS: Mapping[str, tuple[str, str]] = {
    field: (f"_MPU_{axis}_PARALLEL_WORLD_SIZE", f"_MPU_{axis}_PARALLEL_RANK")
    for field, axis in (
        *(("tp", "TENSOR_MODEL"), ("pp", "PIPELINE_MODEL"), ("dp", "DATA")),
        *(("ep", "EXPERT_MODEL"), ("expt_tp", "EXPERT_TENSOR")),
    )
}
"""Field -> the globals with the size and the rank that ``set_*()`` has set."""


_NO_RANKS: Ranks = (-1,)  # for values of set_*(): equal to no group's ranks


def layouts() -> list[Mapping[str, Ranks]]:
    """Return field -> ranks of this rank's group, for each layout of this process.

    These are the layouts of all open owners, and that of the globals if they are initialised. A
    suspended session counts. Globals that ``published()`` hides at the moment count as well.
    """
    found = [
        owner.ranks_by_field
        for owner in open_owners()
        if owner._state in (LeaseState.LIVE, LeaseState.SUSPENDED)
    ]
    state = hidden_by_published(globals_of_core())
    # destroy_model_parallel() forgets to reset some others.
    if any(state.get(name) is not None for name in ALWAYS_SET):
        of_globals = {field: ranks_in_globals(state, field) for field in HOLDS}
        found.append({field: ranks for field, ranks in of_globals.items() if ranks is not None})
    set_to = {
        field: _NO_RANKS
        for field, names in NUMBERS.items()
        if any(state.get(name) is not None for name in names)
    }
    return [*found, set_to]


def differing(found: Iterable[Mapping[str, Ranks]]) -> frozenset[str]:
    """Return the fields for which two of the layouts have different ranks."""
    seen: dict[str, Ranks] = {}
    return frozenset(
        field
        for layout in found
        for field, ranks in layout.items()
        if seen.setdefault(field, ranks) != ranks
    )


def ranks_in_globals(state: Mapping[str, object], field: str) -> Ranks | None:
    """Return the ranks of what ``parallel_state`` holds for a field; None if it holds nothing."""
    held = state.get(HOLDS.get(field, ""))
    if held is None and field in _OUTSIDE and state.get(HOLDS["pp"]) is not None:
        return ()
    return ranks_of(held)


def ranks_of(held: object) -> Ranks | None:
    """Return the ranks of a group or of several in a row; None if torch knows none of them."""
    several = held if isinstance(held, Sequence) else (held,)
    return tuple(rank for group in several for rank in known_ranks(group)) or None
