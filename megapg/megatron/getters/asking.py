"""Functions of a collection that call Megatron's getter if the collection is the globals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TypeVar, cast, overload

from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.errors import MissingGlobalGroupError, UnsupportedOptionError
from megapg.layout import GroupName
from megapg.megatron.reading.global_groups import (
    GlobalGroups,
    getter_at_hand,
    several_pipelines,
    takes,
    value_in_globals,
)

F = TypeVar("F", bound=Callable[..., object])


def asks(
    name: str, *, refused_with: GroupName | None = None, why: Callable[..., object] | None = None
) -> Callable[[F], F]:
    """Make a function call the getter ``name`` if its collection is the globals.

    Arguments that the caller leaves out or passes as None get the getter's default. If this core
    has no such getter, or it does not take an argument of the caller, the function itself runs. If
    ``refused_with`` names a field of rematerialisation, its group must have one rank. If the getter
    fails, ``why`` is called with the same arguments, to raise a better error.
    """

    def decorate(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        names = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]

        @functools.wraps(function)
        def answer(pg: ProcessGroupCollection, *args: object, **kwargs: object) -> object:
            if refused_with:
                refuse_remat(pg, refused_with)
            if isinstance(pg, GlobalGroups) and len(args) <= len(names):
                passed = dict(zip(names, args, strict=False)) | kwargs
                arguments = {key: value for key, value in passed.items() if value is not None}
                if can_be_asked(name, arguments):
                    try:
                        return pg.ask(name, **arguments)
                    except MissingGlobalGroupError:
                        if why is not None:
                            why(pg, **passed)
                        raise
            return function(pg, *args, **kwargs)

        return cast(F, answer)

    return decorate


def can_be_asked(name: str, arguments: Iterable[str] = ()) -> bool:
    """True if this core has the getter ``name``, and it takes these arguments."""
    getter = getter_at_hand(name)
    return getter is not None and takes(getter, arguments)


@overload
def present_group(pg: ProcessGroupCollection, field: GroupName) -> ProcessGroup: ...


@overload
def present_group(
    pg: ProcessGroupCollection, field: GroupName, *, check_initialized: bool
) -> ProcessGroup | None: ...


def present_group(
    pg: ProcessGroupCollection, field: GroupName, *, check_initialized: bool = True
) -> ProcessGroup | None:
    """Return a group for ``get_embedding_group()`` and other getters that fail without a group.

    Never None by default, because torch takes None for WORLD.

    Args:
        pg: the collection.
        field: ``embd``, ``pos_embd``, ``inter_dist_opt`` or any other of one group.
        check_initialized: if False, the result is None if there is no group.

    Raises:
        MissingGroupError: the field is None here, or the collection lacks it; or it is the pipeline
            of a rank that is in several.
    """
    several = field == "pp" and isinstance(pg, GlobalGroups) and several_pipelines() is not None
    checked = check_initialized or several
    found: ProcessGroup | None = getattr(pg, field, *(() if checked else (None,)))
    if found is None and checked:
        pg.ranks(field)  # raises the right error
    return found


def is_of_globals(pg: ProcessGroupCollection, field: GroupName) -> bool:
    """True if a group is the very one in the globals. The test does not count as a read of them."""
    return getattr(pg, field, pg) is value_in_globals(field)


def is_the_globals_pipeline(pg: ProcessGroupCollection) -> bool:
    """True if the globals know more about its pipeline than the group does."""
    return isinstance(pg, GlobalGroups) or (pg.layout is None and is_of_globals(pg, "pp"))


def refuse_remat(pg: ProcessGroupCollection, field: GroupName) -> None:
    """Refuse weight rematerialisation: with it, 0.19's data parallel getters mean wider groups."""
    # This test does not count as a read of the globals.
    view = isinstance(pg, GlobalGroups)
    group = value_in_globals(field) if view else getattr(pg, field, None)
    if isinstance(group, ProcessGroup) and group.size() > 1:
        raise UnsupportedOptionError(
            f"{field} has {group.size()} ranks: megapg does not support generalised tensor "
            "parallelism, under which there are two data parallel groups to choose from. Take the "
            "field that you mean, such as pg.dp or pg.dp_cp_gtp_remat."
        )


def view_of(pg: ProcessGroupCollection) -> GlobalGroups:
    """Return the view of the globals, also for borrowed groups that are the globals' own."""
    return pg if isinstance(pg, GlobalGroups) else GlobalGroups()
