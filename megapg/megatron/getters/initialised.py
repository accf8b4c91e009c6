"""Tests whether groups exist, for the collection that a function was passed.

``megapg migrate`` writes these calls in place of Megatron's ``is_initialized()`` and its relatives.
"""

from __future__ import annotations

from megapg.collection import ProcessGroupCollection
from megapg.megatron.core import MegatronCollection
from megapg.megatron.getters.asking import (
    are_live,
    ask,
    can_be_asked,
    core_is_imported,
    holder_of,
    reads_globals,
)

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
    pg, getter = holder_of(pg_collection), "is_unitialized"
    if reads_globals(pg) and core_is_imported() and can_be_asked(getter):
        return bool(ask(pg, getter))
    return not is_initialized(pg)


def model_parallel_is_initialized(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
) -> bool:
    """True if groups exist, as ``model_parallel_is_initialized()``; see :func:`is_initialized`.

    For None it is whether the globals have tensor, pipeline and data parallel groups.
    """
    return _has(pg_collection, "model_parallel_is_initialized")


def _has(passed: ProcessGroupCollection | MegatronCollection | None, getter: str) -> bool:
    pg = holder_of(passed)
    if not reads_globals(pg):
        return are_live(pg)
    return core_is_imported() and bool(ask(pg, getter))
