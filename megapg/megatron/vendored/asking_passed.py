"""The functions of ``megapg/megatron/getters/asking.py``, for a project without megapg.

``megapg migrate --runtime vendored`` copies this as text. megapg itself never imports it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from typing import Any

from megapg.megatron.vendored.process_groups import (
    _FIELDS,
    MissingGroupError,
    ProcessGroupCollection,
    _getter,
    _globals,
    _takes,
    resolve,
)

ProcessGroup = Any
GroupName = Any
Field = Any
MegatronCollection = object
MissingGlobalGroupError = MissingGroupError


class LayoutError(ValueError):
    """The groups do not tell what is asked."""


class UnsupportedOptionError(ValueError):
    """A combination of options that has no group."""


class UnknownStageError(AssertionError):
    """The model chunk that is meant is unknown."""


def reads_globals(pg: ProcessGroupCollection) -> bool:
    """True if no collection was passed."""
    return pg.passed is None


def is_the_globals(pg: ProcessGroupCollection, field: str) -> bool:
    """True if a group is the one that the globals have: they know more of the job than it does."""
    globals_have = getattr(ProcessGroupCollection(), field, None)
    return pg.passed is None or getattr(pg, field, pg) is globals_have


def can_be_asked(name: str, arguments: Iterable[str] = ()) -> bool:
    """True if this core has the getter ``name``, and it takes these arguments."""
    getter = getattr(_globals(), name, None)
    return getter is not None and _takes(getter, *arguments)


def since_013() -> bool:
    """True but for modules like Megatron-core up to 0.12, whose schedules store the model chunk."""
    stores = can_be_asked("is_pipeline_first_stage", ["ignore_virtual"])
    return not stores or can_be_asked("is_pipeline_first_stage", ["vp_stage"])


def counts_chunks(pg: ProcessGroupCollection) -> bool:
    """True if questions about stages mean model chunks: never those of a passed collection."""
    return pg.passed is None and not since_013()


def ask(pg: ProcessGroupCollection, name: str, **arguments: object) -> object:
    """Call a getter of the globals."""
    if pg.passed is None:
        pg._check()
    return getattr(_globals(), name)(**arguments)


def is_held(name: str) -> bool:
    """True if a private global is set."""
    return getattr(_globals(), name, None) is not None


def read(pg: ProcessGroupCollection, name: str) -> object:
    """Return the value of a private global that has no getter; None if it is unset."""
    if pg.passed is None:
        pg._check()
    return getattr(_globals(), name, None)


def present_group(pg: ProcessGroupCollection, field: str, *, check_initialized: bool = True) -> Any:
    """Return the group of a field, and an error in place of None, which torch takes for WORLD.

    Without ``check_initialized`` it is None where there is no group.
    """
    found = getattr(pg, field, None)
    if found is None and check_initialized:
        pg.ranks(field)  # knows what to say
    return found


def refuse_remat(pg: ProcessGroupCollection, field: str) -> None:
    """Refuse where weights are rematerialised over a field: there are two groups to choose from."""
    group = getattr(pg, field, None)
    if group is not None and group.size() > 1:
        raise UnsupportedOptionError(f"with {field} there are two such groups: take a field of pg.")


def extra_group(pg: ProcessGroupCollection, name: str, of: str = "") -> Any:
    """Return a group that no field holds, which the globals may have."""
    getter = _getter(of, "group_gloo") if of and is_the_globals(pg, of) else None
    if getter is None:
        raise MissingGroupError(why_missing(pg, name))
    return getter()


def why_missing(pg: ProcessGroupCollection, name: str) -> str:
    """Return the text of the error for a group that no field holds."""
    asked = "the globals" if pg.passed is None else "the collection that was passed"
    return f"there is no group {name} in {asked}."


def holder_of(pg_collection: object) -> ProcessGroupCollection:
    """Return the collection that was passed if it holds groups, else the globals."""
    pg = resolve(pg_collection)
    holds = any(getattr(pg.passed, field, None) is not None for field in _FIELDS)
    return pg if holds else ProcessGroupCollection()


def are_live(pg: ProcessGroupCollection) -> bool:
    """True if a collection was passed. Megatron-core's does not know when its groups end."""
    return pg.passed is not None


def owner_of(pg: ProcessGroupCollection) -> str:
    """Return who holds the groups, for an error."""
    return f"the {type(pg.passed).__qualname__} that was passed"


def core_is_imported() -> bool:
    """True if Megatron-core is imported, and so may be initialised."""
    return "megatron.core" in sys.modules


def memory_buffer(pg: ProcessGroupCollection) -> Any:
    """Return ``get_global_memory_buffer()``: scratch memory that calls with the same name share.

    There is one for each collection whose groups are not the globals'.
    """
    if is_the_globals(pg, "tp"):
        return ask(pg, "get_global_memory_buffer")
    held = vars(pg.passed)
    if "_memory_buffer" not in held:
        core = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer
        # A tensor allocated under inference_mode can never be part of a backward pass.
        ordinary = importlib.import_module("torch").inference_mode(False)(core.get_tensor)
        held["_memory_buffer"] = type(core.__name__, (core,), {"get_tensor": ordinary})()
    return held["_memory_buffer"]
