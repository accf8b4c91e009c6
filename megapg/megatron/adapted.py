"""Megatron-core's collections in the form of ours, each worked out once.

To adapt a collection is to look at every rank of every group, and functions ask at every call. An
adaptation is kept with the core's collection, and made anew when that has changed. It is nowhere
else, so whoever puts new groups into the one (:func:`megapg.rebind.rebind`) finds the other.
"""

from __future__ import annotations

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

_KEPT_AS = "_megapg_adapted"


@dataclass(frozen=True, slots=True, eq=False)
class _Adapted:
    held: dict[str, object]  # what the core's held then: it can be changed
    ours: ProcessGroupCollection


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
    namespace = core.__dict__
    kept = namespace.get(_KEPT_AS)
    if (
        isinstance(kept, _Adapted)
        and len(kept.held) == len(namespace) - 1
        and kept.held.items() <= namespace.items()
    ):
        return kept.ours
    held = {name: value for name, value in namespace.items() if name != _KEPT_AS}
    ours = from_megatron(core)
    namespace[_KEPT_AS] = _Adapted(held, ours)
    return ours


def _is_of_core(value: object) -> TypeGuard[MegatronCollection]:
    for each in type(value).__mro__:
        if each.__module__ == _HOME and each.__name__ in _CLASSES:
            return True
    return False
