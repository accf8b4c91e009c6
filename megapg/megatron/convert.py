"""Conversions from and to Megatron-core's own collection, and from its globals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from typing_extensions import TypeIs

from megapg.collection import OPTIONAL_FIELDS, ProcessGroupCollection
from megapg.errors import MissingGroupError
from megapg.layout import FIELDS
from megapg.megatron.core import (
    COLLECTIONS,
    MegatronCollection,
    collection_class,
    collection_fields,
    core_version,
    parallel_state_module,
)
from megapg.megatron.tables import HOLDS, SCHEDULE_TESTS_CLASS
from megapg.megatron.watching import hook

# Before 0.15 the core had several classes, each with some of the fields, under the same names.
_CLASSES = frozenset(
    {"ProcessGroupCollection", "ModelCommProcessGroups"}
    | {"GradCommProcessGroups", "GradFinalizeProcessGroups"}
)

_KEPT_AS = "_megapg_adapted"


def to_megatron(pg: ProcessGroupCollection) -> MegatronCollection:
    """Return an instance of the core's own class that holds exactly the fields of ``pg``.

    Only few places need it: where the core tests the class or writes to the collection. Everywhere
    else, pass the :class:`ProcessGroupCollection` itself. Fields that the installed version does
    not know are left out.

    Raises:
        StaleGroupError: the session of ``pg`` has ended.
    """
    pg.require(owner="to_megatron()")
    known = collection_fields()
    values = {
        field: list(value) if isinstance(value, tuple) else value
        for field, value in vars(pg).items()
        if field in known
    }
    return collection_class()(**values)


def schedule_collection(pg: ProcessGroupCollection) -> ProcessGroupCollection | MegatronCollection:
    """Return ``pg`` in the form that the installed core's pipeline schedules take.

    This is ``pg`` itself if they don't test its class, else :func:`to_megatron` of it.

    Raises:
        StaleGroupError: the session of ``pg`` has ended.
    """
    if core_version() >= SCHEDULE_TESTS_CLASS:
        return to_megatron(pg)
    return pg.require(owner="schedule_collection()")


def from_megatron(collection: MegatronCollection) -> ProcessGroupCollection:
    """Return a frozen view of the groups that the core's collection holds now.

    The groups stay borrowed. A field is absent here if the core leaves it unset, or sets it to None
    and None has no meaning for it. If all fields are None, the collection was made before the
    groups, and every field is absent.

    Raises:
        ForeignGroupError: a field holds something that is no live group of this rank.
    """
    held: dict[str, object] = {
        field: vars(collection)[field] for field in FIELDS if field in vars(collection)
    }
    return _borrow(held if any(value is not None for value in held.values()) else {})


def from_parallel_state() -> ProcessGroupCollection:
    """Return a frozen collection of the groups that ``parallel_state`` holds now.

    The groups stay borrowed.

    Raises:
        MissingGroupError: ``parallel_state`` is not initialised.
    """
    hook.report("from_parallel_state")
    state = vars(parallel_state_module())
    found = {field: state.get(name) for field, name in HOLDS.items()}
    if found["tp"] is None:
        raise MissingGroupError(
            "from_parallel_state(): megatron.core.parallel_state is not initialised. Open a "
            "session (`megapg.session(tp=..., pp=...)`), or call initialize_model_parallel() first."
        )
    return _borrow(found)


def _borrow(values: dict[str, object]) -> ProcessGroupCollection:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    groups = {
        field: None if value == outside or value == [] else value  # 0.12's hcp without levels
        for field, value in values.items()
        if field in OPTIONAL_FIELDS or (value is not None and value != outside)
    }
    return ProcessGroupCollection.from_groups(**groups)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False)
class _Converted:
    held: dict[str, object]  # the core's fields at that time; they can change
    ours: ProcessGroupCollection


def as_collection(value: object) -> ProcessGroupCollection | None:
    """Return ``value`` as megapg's collection, if it is megapg's or Megatron-core's; else None."""
    # By type(): isinstance() may run the value's own code.
    if issubclass(type(value), ProcessGroupCollection):
        return cast("ProcessGroupCollection", value)
    return converted(value) if _is_of_core(value) else None


def converted(core: MegatronCollection) -> ProcessGroupCollection:
    """Return the result of :func:`~megapg.megatron.from_megatron`, the same object until it
    changes.

    A conversion visits every rank of every group, and functions need it at every call. So the
    result is stored in the core's collection, and made again when that has changed. It is stored
    nowhere else, so :func:`megapg.ownership.rebind.rebind` finds it there.
    """
    namespace = core.__dict__
    kept = namespace.get(_KEPT_AS)
    if (
        isinstance(kept, _Converted)
        and len(kept.held) == len(namespace) - 1
        and kept.held.items() <= namespace.items()
    ):
        return kept.ours
    held = {name: value for name, value in namespace.items() if name != _KEPT_AS}
    ours = from_megatron(core)
    namespace[_KEPT_AS] = _Converted(held, ours)
    return ours


def _is_of_core(value: object) -> TypeIs[MegatronCollection]:
    for each in type(value).__mro__:
        if each.__module__ == COLLECTIONS and each.__name__ in _CLASSES:
            return True
    return False
