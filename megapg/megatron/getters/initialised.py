"""Tests whether groups exist, for the collection that a function was passed."""

from __future__ import annotations

from megapg.collection import ProcessGroupCollection
from megapg.megatron.convert import as_collection
from megapg.megatron.core import MegatronCollection, modules_at_hand
from megapg.megatron.getters.asking import can_be_asked
from megapg.megatron.reading.global_groups import GlobalGroups

__all__ = ["is_initialized", "is_unitialized", "model_parallel_is_initialized"]


def is_initialized(pg_collection: ProcessGroupCollection | MegatronCollection | None) -> bool:
    """True if groups exist, as ``is_initialized()``.

    Call it with the argument of a function, before :func:`~megapg.megatron.resolve`. For a
    collection of live groups the result is True, whatever its fields: a model's may lack the data
    parallel group. For None it is whether the globals have a data parallel group.
    """
    return _has(pg_collection, "is_initialized")


def is_unitialized(pg_collection: ProcessGroupCollection | MegatronCollection | None) -> bool:
    """True if no groups exist, as ``is_unitialized()`` up to 0.16; see :func:`is_initialized`."""
    pg, getter = _asked(pg_collection), "is_unitialized"
    if isinstance(pg, GlobalGroups) and modules_at_hand() and can_be_asked(getter):
        return bool(pg.ask(getter))
    return not is_initialized(pg)


def model_parallel_is_initialized(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
) -> bool:
    """True if groups exist, as ``model_parallel_is_initialized()``; see :func:`is_initialized`.

    For None it is whether the globals have tensor, pipeline and data parallel groups.
    """
    return _has(pg_collection, "model_parallel_is_initialized")


def _has(passed: ProcessGroupCollection | MegatronCollection | None, getter: str) -> bool:
    pg = _asked(passed)
    if not isinstance(pg, GlobalGroups):
        return pg.holds(())
    # If Megatron-core is not imported, it is not initialised.
    return bool(modules_at_hand()) and bool(pg.ask(getter))


def _asked(passed: ProcessGroupCollection | MegatronCollection | None) -> ProcessGroupCollection:
    """Return the collection that was passed if it holds groups, else the globals."""
    pg = as_collection(passed)  # it may be Megatron-core's own
    if pg is None:
        return GlobalGroups()
    if isinstance(pg, GlobalGroups) or any(group is not None for group in vars(pg).values()):
        return pg
    return GlobalGroups()  # a collection without groups was made before them
