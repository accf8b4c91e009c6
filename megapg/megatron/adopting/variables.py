"""The variables of ``parallel_state``: finding the groups in them, and replacing these."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import cast

import torch.distributed as dist

from megapg import torch_private
from megapg.collection import (
    OPTIONAL_FIELDS,
    Lease,
    ProcessGroup,
    ProcessGroupCollection,
    membership,
)
from megapg.communicators.needed import Communicator
from megapg.errors import UnsupportedVersionError
from megapg.layout import FIELDS
from megapg.megatron.publish import is_published
from megapg.megatron.tables import (
    ALWAYS_SET,
    GLOO_GLOBALS,
    GROUP_GLOBALS,
    GROUP_LIST,
    HYBRID_GROUPS,
)

NAME = "megatron.core.parallel_state"

# variable -> the field or the name of the extra that its group is
_NAMES: Mapping[str, str] = {**GROUP_GLOBALS, **GLOO_GLOBALS, HYBRID_GROUPS: "hybrid"}


def groups_held(module: ModuleType) -> list[ProcessGroup]:
    """Return the live groups that ``parallel_state`` is initialised with, in order of creation.

    WORLD is left out. So are groups of earlier cycles, as ``destroy_model_parallel`` does not reset
    all variables.
    """
    variables = _variables(module)
    if not any(isinstance(variables.get(name), (ProcessGroup, list)) for name in ALWAYS_SET):
        return []
    of_this_cycle = set(groups_in(variables.get(GROUP_LIST)))  # empty in cores without the list
    held = {group for value in variables.values() for group in groups_in(value)}
    live = [g for g in torch_private.known_groups() if g in held and g is not dist.group.WORLD]
    first = next((index for index, group in enumerate(live) if group in of_this_cycle), 0)
    return live[first:]


class Globals:
    """The variables that hold an owner's groups: takes the groups out, and puts them back."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._places: dict[str, object] = {}  # their values while the groups are away

    def published(self) -> str:
        """Return why the globals can't be changed; empty if they can."""
        if not is_published(self._module):
            return ""
        return "inside published() the globals show another's groups; leave that block first"

    def lift(self, ours: Mapping[ProcessGroup, Communicator]) -> None:
        """Remember the places of the groups by their communicators, which keeps no group alive."""
        held = _holding(self._module, ours).items()
        self._places = {name: _replaced(value, ours) for name, value in held}

    def in_the_way(self) -> str:
        """Return why the groups can't come back to this rank's globals; empty if they can."""
        if reason := self.published():
            return reason
        variables = vars(self._module)
        for name, place in self._places.items():
            if set(groups_in(variables.get(name))) - set(groups_in(place)):
                return (
                    f"{name} holds another group, since {NAME} was initialised in the meantime. "
                    "Destroy what was made there first"
                )
        return ""

    def put_back(self, made: Mapping[Communicator, ProcessGroup]) -> None:
        """Put the new groups into the places of the old ones."""
        places = self._places.items()
        vars(self._module).update({name: _replaced(value, made) for name, value in places})
        self._places = {}

    def clear(self, ours: Collection[ProcessGroup]) -> None:
        """Remove the groups from the variables, so that no code gets a dead one."""
        if not (held := _holding(self._module, ours)):
            return
        fresh = _fresh_variables(self._module)
        left = {name: _without(value, ours) for name, value in held.items()}
        vars(self._module).update({name: value or fresh.get(name) for name, value in left.items()})

    def reset(self, ours: Collection[ProcessGroup], *, finish: bool) -> None:
        """Reset the globals to their values after an import, except those of other groups.

        With ``finish`` also end other resources of the version: NCCL's contexts for experts,
        symmetric memory.
        """
        self.clear(ours)
        self._places = {}
        if groups_held(self._module):  # initialised again since: the rest belongs to others
            return
        vars(self._module).update(_fresh_variables(self._module))
        if finish:
            self._module.destroy_model_parallel()


def names_of_groups(module: ModuleType) -> dict[ProcessGroup, list[str]]:
    """Return group -> its names, for every group in a variable other than the list of all groups.

    Fields (``hcp.0`` for a level) and names of extras come first, then names of variables.
    """
    found: dict[ProcessGroup, list[str]] = {}
    variables = _variables(module)
    for variable in dict.fromkeys((*_NAMES, *variables)):
        if variable == GROUP_LIST:
            continue
        name, value = _NAMES.get(variable, variable), variables.get(variable)
        members: dict[str, object] = {name: value}
        if isinstance(value, (list, tuple)):
            members = {f"{name}.{index}": member for index, member in enumerate(value)}
        elif isinstance(value, dict):
            members = {f"{name}.{key}": member for key, member in value.items()}
        for each, group in members.items():
            if isinstance(group, ProcessGroup) and each not in found.setdefault(group, []):
                found[group].append(each)
    return found


def collection(
    module: ModuleType, made: Sequence[tuple[Communicator, ProcessGroup]], lease: Lease
) -> ProcessGroupCollection:
    """Return a collection of the groups in the globals. Groups that fit no field are left out."""
    ours = {group for _, group in made}
    named = {
        name: group
        for group, names in names_of_groups(module).items()
        if group in ours
        for name in names
    }
    values: dict[str, ProcessGroup | list[ProcessGroup] | None] = dict.fromkeys(OPTIONAL_FIELDS)
    values |= {name: group for name, group in named.items() if name in FIELDS}
    values["hcp"] = [group for name, group in named.items() if name.startswith("hcp.")] or None
    extras = {n: group for n, group in named.items() if n.startswith(("gloo.", "hybrid."))}
    members = {name: membership(name, group) for name, group in named.items()}
    return ProcessGroupCollection(values, members, lease, None, extras)


def _holding(module: ModuleType, groups: Collection[ProcessGroup]) -> dict[str, object]:
    """Return variable -> value, of the variables that hold one of ``groups``."""
    return {
        name: value
        for name, value in _variables(module).items()
        if any(group in groups for group in groups_in(value))
    }


def groups_in(value: object) -> Iterator[ProcessGroup]:
    """Yield the groups in the value of a variable: itself, or inside of lists and dicts."""
    if isinstance(value, ProcessGroup):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from groups_in(each)


def _replaced(
    value: object, change: Mapping[ProcessGroup, Communicator] | Mapping[Communicator, ProcessGroup]
) -> object:
    if isinstance(value, dict):
        return {key: _replaced(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(each, change) for each in value)
    if not isinstance(value, (ProcessGroup, Communicator)):
        return value
    return cast("Mapping[object, object]", change).get(value, value)


def _without(value: object, groups: Collection[ProcessGroup]) -> object:
    """Return ``value`` without ``groups``; None if no other group is left in it."""
    if not any(group not in groups for group in groups_in(value)):
        return None
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if not _among(each, groups)}
    if isinstance(value, (list, tuple)):
        return type(value)(each for each in value if not _among(each, groups))
    return value


def _among(value: object, groups: Collection[ProcessGroup]) -> bool:
    return isinstance(value, ProcessGroup) and value in groups


def _fresh_variables(module: ModuleType) -> dict[str, object]:
    """Return the module's variables as after an import, from a copy that is executed for this."""
    spec = importlib.util.find_spec(module.__name__)
    if spec is None or spec.loader is None:
        raise UnsupportedVersionError(
            f"{module.__name__} can't be run again, to see what its variables begin with."
        )
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return {
        name: value
        for name, value in _variables(copy).items()
        if name.startswith("_") and isinstance(value, (type(None), list, dict))
    }


def _variables(module: ModuleType) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}
