"""Megatron-core's collections in the form of ours, each worked out once.

To adapt a collection is to look at every rank of every group, and functions ask at every call. An
adaptation is kept as long as the core's collection lives, and made anew when that has changed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TypeGuard, cast

from megapg.collection import ProcessGroupCollection
from megapg.megatron.adapter import from_megatron
from megapg.megatron.core import MegatronCollection

# Before 0.15 the core had several classes, each with some of the fields, by the same names.
_HOME = "megatron.core.process_groups_config"
_CLASSES = frozenset(
    {
        "ProcessGroupCollection",
        "ModelCommProcessGroups",
        "GradCommProcessGroups",
        "GradFinalizeProcessGroups",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class _Adapted:
    core: weakref.ref[MegatronCollection]
    held: dict[str, object]  # what the core's held then: it can be changed
    ours: ProcessGroupCollection


# By identity, since the core's compare by value and so have no hash. The reference tells another
# object at the same address apart, and takes the entry away with the collection.
_known: dict[int, _Adapted] = {}


def as_collection(value: object) -> ProcessGroupCollection | None:
    """``value`` as a collection of ours, if it is one of ours or of Megatron-core's.

    Raises:
        ForeignGroupError: one of the core's holds something that is no live group of this rank.
    """
    # By type(), as isinstance() may run the value's own code, and values are of any kind.
    if issubclass(type(value), ProcessGroupCollection):
        return cast("ProcessGroupCollection", value)
    return adapted(value) if _is_of_core(value) else None


def adapted(core: MegatronCollection) -> ProcessGroupCollection:
    """What :func:`~megapg.megatron.from_megatron` makes of it: the same object until it changes.

    Raises:
        ForeignGroupError: a field holds something that is no live group of this rank.
    """
    key = id(core)
    entry = _known.get(key)
    if entry is not None and entry.core() is core and entry.held == core.__dict__:
        return entry.ours

    def forget(dead: weakref.ref[MegatronCollection]) -> None:
        entry = _known.get(key)
        if entry is not None and entry.core is dead:
            del _known[key]

    held = dict(core.__dict__)
    ours = from_megatron(core)
    _known[key] = _Adapted(weakref.ref(core, forget), held, ours)
    return ours


def _is_of_core(value: object) -> TypeGuard[MegatronCollection]:
    for each in type(value).__mro__:
        if each.__module__ == _HOME and each.__name__ in _CLASSES:
            return True
    return False
