"""Which new groups stand in for which old ones."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from megapg.collection import ProcessGroup, ProcessGroupCollection


class Replacements:
    """Which new object stands in for which old one; the old ones are not kept alive by this.

    By identity: a group that only compares equal is another group.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], object]] = {}
        self._names: set[str] = set()

    def add(
        self,
        old: weakref.ref[ProcessGroup] | weakref.ref[ProcessGroupCollection],
        new: ProcessGroup | ProcessGroupCollection,
    ) -> None:
        """One more pair. Where the old object is gone already there is nothing to replace.

        Args:
            old: a weak reference to what is to be replaced.
            new: what takes its place, of the same kind.
        """
        target = old()
        if target is not None:
            self._by_id[id(target)] = (old, new)
            if isinstance(target, dist.ProcessGroup):
                self._names.add(target.group_name)

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._names) or bool(self.alive())

    def get(self, value: object) -> object | None:
        """What stands in for ``value``, or None."""
        entry = self._by_id.get(id(value))
        # An object that died may have left its address to another one.
        return entry[1] if entry is not None and entry[0]() is value else None

    @property
    def names(self) -> frozenset[str]:
        """The names that the old groups have in torch, as far as they are known."""
        return frozenset(self._names)

    def alive(self) -> list[object]:
        """The old objects that somebody still holds."""
        found = (old() for old, _ in self._by_id.values())
        return [old for old in found if old is not None]
