"""What an owner has handed out, remembered without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch.distributed as dist

from megapg.collection import ProcessGroupCollection
from megapg.comms.holders import holders
from megapg.comms.plan import Communicator

Handle: TypeAlias = dist.ProcessGroup | ProcessGroupCollection
HandleRef: TypeAlias = weakref.ref[dist.ProcessGroup] | weakref.ref[ProcessGroupCollection]


class Handles:
    """The groups and collections of all generations that somebody still holds."""

    def __init__(self) -> None:
        self._groups: list[tuple[Communicator, weakref.ref[dist.ProcessGroup]]] = []
        self._collections: list[weakref.ref[ProcessGroupCollection]] = []
        self._worlds: list[weakref.ref[dist.ProcessGroup]] = []

    def add(
        self,
        groups: Iterable[tuple[Communicator, dist.ProcessGroup]],
        collection: ProcessGroupCollection,
        world: dist.ProcessGroup | None,
    ) -> None:
        """Remember one more generation, and forget what nobody holds any more."""
        self._groups = [known for known in self._groups if known[1]() is not None]
        self._groups += [(communicator, weakref.ref(group)) for communicator, group in groups]
        self._collections = [known for known in self._collections if known() is not None]
        self._collections.append(weakref.ref(collection))
        self._worlds = [known for known in self._worlds if known() not in (None, world)]
        if world is not None:
            self._worlds.append(weakref.ref(world))

    def outdated(
        self,
        groups: Iterable[tuple[Communicator, dist.ProcessGroup]],
        collection: ProcessGroupCollection,
        world: dist.ProcessGroup | None,
    ) -> Iterator[tuple[HandleRef, Handle]]:
        """Each handle of an earlier generation that somebody holds, and what took its place.

        Args:
            groups: the communicators of this generation.
            collection: of this generation.
            world: the owner's WORLD, if it is the owner's.
        """
        serving = dict(groups)
        pairs: list[tuple[HandleRef, Handle]] = [
            *((known, serving[communicator]) for communicator, known in self._groups),
            *((known, collection) for known in self._collections),
            *((known, world) for known in self._worlds if world is not None),
        ]
        return ((old, new) for old, new in pairs if old() is not None and old() is not new)

    def live_references(self, own: set[int]) -> list[str]:
        """Who holds any of them; see :meth:`megapg.sessions.Session.live_references`.

        Args:
            own: ids of the owner's own containers, which are left out.
        """
        alive = [known() for known in self._collections]
        collections = [collection for collection in alive if collection is not None]
        own = {*own, id(alive), id(collections)}
        for collection in collections:
            own |= {id(collection), id(vars(collection)), id(collection._extras)}
        found = []
        for communicator, known in self._groups:
            group = known()
            if group is not None:
                fields = communicator.fields
                name = "+".join(fields[:3]) + ("+..." if len(fields) > 3 else "")
                found += [f"{name}: {line}" for line in holders(group, own)]
        for collection in collections:
            found += [f"the collection: {line}" for line in holders(collection, own)]
        return found
