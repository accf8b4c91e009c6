"""Restores ``parallel_state`` after a test, and closes sessions and WORLD that it left open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch.distributed as dist

from megapg import torch_private
from megapg.megatron.adopting.variables import groups_in
from megapg.megatron.core import globals_of_core, parallel_state_module
from megapg.ownership.closing import leave, open_owners

_Content: TypeAlias = "list[object] | dict[object, object] | None"


@dataclass(frozen=True)
class Before:
    """The state before a test. Without arguments: nothing, torch not even imported."""

    # of ``parallel_state``: name -> its value, and a copy of the contents of a list or a dict
    variables: Mapping[str, tuple[object, _Content]] = field(default_factory=dict)
    groups: frozenset[dist.ProcessGroup] = frozenset()  # groups in torch's registry
    world: bool = False  # True if WORLD existed
    owners: frozenset[int] = frozenset()  # ids of the open sessions, and of other owners

    @classmethod
    def now(cls) -> Before:
        """Return the present state."""
        variables = {name: (value, _content(value)) for name, value in _variables().items()}
        groups, owners = frozenset(torch_private.known_groups()), frozenset(map(id, open_owners()))
        return cls(variables, groups, dist.is_initialized(), owners)


def close_owners(before: Before) -> list[str]:
    """Close the sessions, and other owners of groups, that a test left open, and name them.

    No other rank is waited for.
    """
    left = [owner for owner in open_owners() if id(owner) not in before.owners]
    titles = [owner._title for owner in left]
    for owner in reversed(left):
        leave(owner)
    return titles


def close_world(before: Before) -> list[str]:
    """Close WORLD if a test left it open, and name it.

    It stays if a launcher started this process: the ranks of a job share WORLD between tests.
    """
    if dist.is_initialized() and not before.world and "RANK" not in os.environ:
        dist.destroy_process_group()
        return ["WORLD"]
    return []


def put_back(before: Before) -> str:
    """Restore every variable of ``parallel_state``, close the groups left in it, and count these.

    A group is closed if torch did not know it before the test. If Megatron-core was not yet
    imported, the variables end as after an import.
    """
    held = set(groups_in(_variables()))
    _restore(before)
    new = [group for group in torch_private.known_groups() if group in held - before.groups]
    for group in reversed(new):
        if torch_private.knows(group):
            dist.destroy_process_group(group)
    return f"{len(new)} process groups in parallel_state" if new else ""


def _variables() -> dict[str, object]:
    return {
        name: value
        for name, value in globals_of_core().items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    }


def _content(value: object) -> _Content:
    if isinstance(value, list):
        return [*value]
    return {**value} if isinstance(value, dict) else None


def _restore(before: Before) -> None:
    state = vars(parallel_state_module())
    for name, left in _variables().items():
        if before.variables:
            del state[name]
        else:  # imported since: an import initialises nothing
            state[name] = {} if isinstance(left, dict) else None
    for name, (value, content) in before.variables.items():
        if isinstance(value, dict) and isinstance(content, dict):
            value.clear()
            value.update(content)
        elif isinstance(value, list) and isinstance(content, list):
            value[:] = content
        state[name] = value
