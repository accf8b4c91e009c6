"""The variables of ``parallel_state``: the groups in them, and putting others in their places."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import cast

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megapg.collection import ProcessGroup
from megapg.comms.plan import Communicator
from megapg.errors import UnsupportedVersionError
from megapg.megatron.tables import GLOO_GLOBALS, GROUP_GLOBALS, GROUP_LIST, HYBRID_GROUPS

# variable -> what its group serves as: a field, or the name of an extra.
_NAMES: Mapping[str, str] = {**GROUP_GLOBALS, **GLOO_GLOBALS, HYBRID_GROUPS: "hybrid"}

# Every initialisation sets these, and destroy_model_parallel resets them in every version.
_ALWAYS_SET = (
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_PIPELINE_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
)


def groups_held(module: ModuleType) -> list[ProcessGroup]:
    """The live groups that ``parallel_state`` is initialised with, in the order of their creation.

    Never WORLD; nor what its variables still hold of a cycle that has ended, for
    ``destroy_model_parallel`` leaves some as they are.
    """
    variables = _variables(module)
    if not any(isinstance(variables.get(name), (ProcessGroup, list)) for name in _ALWAYS_SET):
        return []
    of_this_cycle = set(groups_in(variables.get(GROUP_LIST)))  # empty in cores without the list
    held = {group for value in variables.values() for group in groups_in(value)}
    live = [g for g in c10d._world.pg_map if g in held and g is not dist.group.WORLD]
    first = next((index for index, group in enumerate(live) if group in of_this_cycle), 0)
    return live[first:]


def names_of_groups(module: ModuleType) -> dict[ProcessGroup, list[str]]:
    """group -> what it serves as, for every group in a variable that is more than the list of all.

    That is fields (``hcp.0`` for a level) and names of extras first, then names of variables.
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


def holding(module: ModuleType, groups: Collection[ProcessGroup]) -> dict[str, object]:
    """variable -> value, of those that hold one of ``groups``."""
    return {
        name: value
        for name, value in _variables(module).items()
        if any(group in groups for group in groups_in(value))
    }


def groups_in(value: object) -> Iterator[ProcessGroup]:
    """The groups in the value of a variable: itself, or inside of lists and dicts."""
    if isinstance(value, ProcessGroup):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from groups_in(each)


def lifted(value: object, groups: Mapping[ProcessGroup, Communicator]) -> object:
    """``value`` with a communicator in the place of each of ``groups``: it keeps none alive."""
    return _replaced(value, cast("Mapping[object, object]", groups))


def placed(value: object, made: Mapping[Communicator, ProcessGroup]) -> object:
    """The opposite of :func:`lifted`, with other groups."""
    return _replaced(value, cast("Mapping[object, object]", made))


def _replaced(value: object, change: Mapping[object, object]) -> object:
    if isinstance(value, dict):
        return {key: _replaced(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(each, change) for each in value)
    return change.get(value, value) if isinstance(value, (ProcessGroup, Communicator)) else value


def without(value: object, groups: Collection[ProcessGroup]) -> object:
    """``value`` without ``groups``; None where no other group is left in it."""
    if not any(group not in groups for group in groups_in(value)):
        return None
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if not _among(each, groups)}
    if isinstance(value, (list, tuple)):
        return type(value)(each for each in value if not _among(each, groups))
    return value


def _among(value: object, groups: Collection[ProcessGroup]) -> bool:
    return isinstance(value, ProcessGroup) and value in groups


def fresh_variables(module: ModuleType) -> dict[str, object]:
    """The module's state as it is after an import: that of a copy which is run for the purpose."""
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
