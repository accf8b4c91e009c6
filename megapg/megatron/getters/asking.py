"""How the getters of this folder ask: the collection, or Megatron's getter if it is the globals.

The bodies of the getters know of nothing else. ``megapg/megatron/vendored/asking_passed.py`` has
the same functions for a project without megapg, into which ``megapg migrate`` copies the bodies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast, overload

from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.errors import UnsupportedOptionError
from megapg.layout import GroupName
from megapg.megatron.convert import as_collection
from megapg.megatron.core import MegatronCollection, installed_version, modules_at_hand
from megapg.megatron.reading.global_groups import (
    GlobalGroups,
    getter_at_hand,
    held_now,
    several_pipelines,
    takes,
    value_in_globals,
)
from megapg.megatron.tables import TAKES_VP_STAGE


def can_be_asked(name: str, arguments: Iterable[str] = ()) -> bool:
    """True if this core has the getter ``name``, and it takes these arguments."""
    getter = getter_at_hand(name)
    return getter is not None and takes(getter, arguments)


def since_013() -> bool:
    """True if callers of this core pass the model chunk. Up to 0.12 the core stored it."""
    return installed_version() >= TAKES_VP_STAGE


def counts_chunks(pg: ProcessGroupCollection) -> bool:
    """True if questions about stages mean model chunks, unless they say otherwise."""
    return not since_013()


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


def reads_globals(pg: ProcessGroupCollection) -> bool:
    """True if the collection is the view of the globals."""
    return isinstance(pg, GlobalGroups)


def is_the_globals(pg: ProcessGroupCollection, field: GroupName) -> bool:
    """True if a group is the very one in the globals, which know more about it.

    The test does not count as a read of the globals.
    """
    if reads_globals(pg):
        return True
    return pg.layout is None and getattr(pg, field, pg) is value_in_globals(field)


def ask(pg: ProcessGroupCollection, name: str, **arguments: object) -> object:
    """Call a getter of the globals, also for borrowed groups that are the globals' own."""
    return _view_of(pg).ask(name, **arguments)


def is_held(name: str) -> bool:
    """True if a private global is set. The test does not count as a read of it."""
    return held_now(name) is not None


def read(pg: ProcessGroupCollection, name: str) -> object:
    """Return the value of a private global that has no getter; None if it is unset."""
    return _view_of(pg).read(name)


def _view_of(pg: ProcessGroupCollection) -> GlobalGroups:
    return pg if isinstance(pg, GlobalGroups) else GlobalGroups()


def refuse_remat(pg: ProcessGroupCollection, field: GroupName) -> None:
    """Refuse weight rematerialisation: with it, 0.19's data parallel getters mean wider groups."""
    # This test does not count as a read of the globals.
    group = value_in_globals(field) if reads_globals(pg) else getattr(pg, field, None)
    if isinstance(group, ProcessGroup) and group.size() > 1:
        raise UnsupportedOptionError(
            f"{field} has {group.size()} ranks: megapg does not support generalised tensor "
            "parallelism, under which there are two data parallel groups to choose from. Take the "
            "field that you mean, such as pg.dp or pg.dp_cp_gtp_remat."
        )


def extra_group(
    pg: ProcessGroupCollection, name: GroupName, of: GroupName | None = None
) -> ProcessGroup:
    """Return an extra; that of the globals if the collection has none and ``of`` is their group.

    Raises:
        MissingGroupError: there is none.
    """
    if of is not None and is_the_globals(pg, of) and (reads_globals(pg) or name not in pg.extras):
        return cast(ProcessGroup, _view_of(pg).group(name))
    pg.ranks(name)  # raises the right error if there is none
    return pg.extras[name]


def why_missing(pg: ProcessGroupCollection, name: str) -> str:
    """Return the text of the error for an extra that the globals do not have."""
    return str(_view_of(pg)._no_such(name))


def holder_of(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
) -> ProcessGroupCollection:
    """Return the collection that was passed if it holds groups, else the globals."""
    pg = as_collection(pg_collection)  # it may be Megatron-core's own
    if pg is None:
        return GlobalGroups()
    if isinstance(pg, GlobalGroups) or any(group is not None for group in vars(pg).values()):
        return pg
    return GlobalGroups()  # a collection without groups was made before them


def are_live(pg: ProcessGroupCollection) -> bool:
    """True if the groups of a collection have not ended."""
    return pg.holds(())


def owner_of(pg: ProcessGroupCollection) -> str:
    """Return who owns the groups, for an error."""
    return pg.lease.owner


def core_is_imported() -> bool:
    """True if Megatron-core is imported, and so may be initialised."""
    return bool(modules_at_hand())
