"""Functions of a collection that are a getter of Megatron's where the globals are asked."""

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
    """The function is the getter ``name`` where it is the globals that are asked.

    What the caller leaves out or passes as None is left to the getter's default. Where this core
    has no such getter, or it does not take what the caller passes, the function itself answers.
    Where ``refused_with`` names a field of rematerialisation its group must be of one rank. Where
    the getter fails, ``why`` is called with the same arguments: it may know a better error.
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
    """Whether this core has the getter ``name``, and it takes these arguments."""
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
    """For ``get_embedding_group()`` and whatever else fails where there is no group: never None,
    which torch would take for WORLD.

    Args:
        pg: the collection.
        field: ``embd``, ``pos_embd``, ``inter_dist_opt`` or any other of one group.
        check_initialized: if False, the answer is None where there is no group.

    Raises:
        MissingGroupError: the field is None here, or the collection lacks it; or it is the pipeline
            of a rank that is in several.
    """
    several = field == "pp" and isinstance(pg, GlobalGroups) and several_pipelines() is not None
    checked = check_initialized or several
    found: ProcessGroup | None = getattr(pg, field, *(() if checked else (None,)))
    if found is None and checked:
        pg.ranks(field)  # knows what to say
    return found


def is_of_globals(pg: ProcessGroupCollection, field: GroupName) -> bool:
    """Whether a group is the very one that the globals have; to find out is no read of them."""
    return getattr(pg, field, pg) is value_in_globals(field)


def is_the_globals_pipeline(pg: ProcessGroupCollection) -> bool:
    """Whether the globals know of its pipeline what no group tells."""
    return isinstance(pg, GlobalGroups) or (pg.layout is None and is_of_globals(pg, "pp"))


def refuse_remat(pg: ProcessGroupCollection, field: GroupName) -> None:
    """With weight rematerialisation on, 0.19's data parallel getters mean wider groups than dp."""
    # To find out is no read of the globals.
    view = isinstance(pg, GlobalGroups)
    group = value_in_globals(field) if view else getattr(pg, field, None)
    if isinstance(group, ProcessGroup) and group.size() > 1:
        raise UnsupportedOptionError(
            f"{field} has {group.size()} ranks: megapg does not support generalised tensor "
            "parallelism, under which there are two data parallel groups to choose from. Take the "
            "field that you mean, such as pg.dp or pg.dp_cp_gtp_remat."
        )


def view_of(pg: ProcessGroupCollection) -> GlobalGroups:
    """The globals, as a view of them or as borrowed groups that are theirs."""
    return pg if isinstance(pg, GlobalGroups) else GlobalGroups()
