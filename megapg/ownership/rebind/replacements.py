"""The map from old groups and collections to new ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch.distributed as dist

from megapg.collection import ProcessGroup, ProcessGroupCollection

_Old: TypeAlias = weakref.ref[ProcessGroup] | weakref.ref[ProcessGroupCollection]
_New: TypeAlias = ProcessGroup | ProcessGroupCollection


class Replacements:
    """A map from old to new objects, by identity, that does not keep the old objects alive.

    A group that only compares equal is a different group.

    Args:
        pairs: arguments of :meth:`add`.
    """

    def __init__(self, pairs: Iterable[tuple[_Old, _New]] = ()) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], object]] = {}
        self._names: set[str] = set()
        for pair in pairs:
            self.add(*pair)

    def add(self, old: _Old, new: _New) -> None:
        """Add a pair, unless the old object no longer exists.

        Args:
            old: a weak reference to the old object.
            new: the new object, of the same kind.
        """
        target = old()
        if target is not None:
            self._by_id[id(target)] = (old, new)
            if isinstance(target, dist.ProcessGroup):
                self._names.add(target.group_name)

    def __bool__(self) -> bool:
        """True if there is anything to replace."""
        return bool(self._names) or bool(self.alive())

    def get(self, value: object) -> object | None:
        """Return the replacement of ``value``, or None."""
        entry = self._by_id.get(id(value))
        # A new object may have the id of an old one that was freed.
        return entry[1] if entry is not None and entry[0]() is value else None

    @property
    def names(self) -> frozenset[str]:
        """The names of the old groups in torch, for groups added while alive."""
        return frozenset(self._names)

    def alive(self) -> list[object]:
        """Return the old objects that still exist."""
        found = (old() for old, _ in self._by_id.values())
        return [old for old in found if old is not None]
