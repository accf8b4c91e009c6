"""Whether there are groups to use: asked of what a function was passed."""

from __future__ import annotations

from megapg.collection import ProcessGroupCollection
from megapg.megatron.convert import as_collection
from megapg.megatron.core import MegatronCollection, modules_at_hand
from megapg.megatron.getters.asking import can_be_asked
from megapg.megatron.reading.global_groups import GlobalGroups

__all__ = ["is_initialized", "is_unitialized", "model_parallel_is_initialized"]


def is_initialized(pg_collection: ProcessGroupCollection | MegatronCollection | None) -> bool:
    """For ``is_initialized()``: whether there are groups to use. A collection of live groups
    answers True, whatever its fields: a model's may lack the data parallel group.

    Asked of what a function was passed, before :func:`~megapg.megatron.resolve`: None asks the
    globals whether they have a data parallel group.
    """
    return _has(pg_collection, "is_initialized")


def is_unitialized(pg_collection: ProcessGroupCollection | MegatronCollection | None) -> bool:
    """For ``is_unitialized()``, there up to 0.16: the opposite of :func:`is_initialized`."""
    pg, getter = _asked(pg_collection), "is_unitialized"
    if isinstance(pg, GlobalGroups) and modules_at_hand() and can_be_asked(getter):
        return bool(pg.ask(getter))
    return not is_initialized(pg)


def model_parallel_is_initialized(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
) -> bool:
    """For ``model_parallel_is_initialized()``: whether there are groups to use, of a collection as
    :func:`is_initialized`.

    Asked of what a function was passed, before :func:`~megapg.megatron.resolve`: None asks the
    globals whether they have tensor, pipeline and data parallel groups.
    """
    return _has(pg_collection, "model_parallel_is_initialized")


def _has(passed: ProcessGroupCollection | MegatronCollection | None, getter: str) -> bool:
    pg = _asked(passed)
    if not isinstance(pg, GlobalGroups):
        return pg.holds(())
    # Where nobody has imported Megatron-core nobody has initialised it.
    return bool(modules_at_hand()) and bool(pg.ask(getter))


def _asked(passed: ProcessGroupCollection | MegatronCollection | None) -> ProcessGroupCollection:
    """Who knows whether there are groups: what was passed, else the globals."""
    pg = as_collection(passed)  # it may be Megatron-core's own, as resolve() takes it
    if pg is None:
        return GlobalGroups()
    if isinstance(pg, GlobalGroups) or any(group is not None for group in vars(pg).values()):
        return pg
    return GlobalGroups()  # one that holds no group was made before there were any: there may be
