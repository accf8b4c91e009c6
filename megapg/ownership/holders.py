"""Weak references to all groups and collections that an owner has handed out, and their holders."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from types import CellType, FrameType, FunctionType, ModuleType
from typing import TypeAlias

import torch.distributed as dist

from megapg import torch_private
from megapg.collection import ProcessGroupCollection
from megapg.communicators.needed import Communicator, shortened
from megapg.errors import SessionError

Handle: TypeAlias = dist.ProcessGroup | ProcessGroupCollection
HandleRef: TypeAlias = weakref.ref[dist.ProcessGroup] | weakref.ref[ProcessGroupCollection]


class References:
    """Weak references to the groups and collections of all generations."""

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
        """Add a generation, and drop references to objects that no longer exist."""
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
        """Pair each handle of an earlier generation that still exists with its replacement.

        Args:
            groups: the communicators of this generation.
            collection: the collection of this generation.
            world: WORLD, if the owner made it.

        Raises:
            SessionError: a handle has no replacement. The generation is another owner's.
        """
        serving = dict(groups)
        held = [(made, known) for made, known in self._groups if known() is not None]
        if missing := [made for made, _ in held if made not in serving]:
            fields = shortened([field for made in missing for field in made.fields])
            raise SessionError(
                f"rebind(): {collection.lease.owner} has no groups like the earlier {fields}. Open "
                "it with the same layout, ranks and settings."
            )
        pairs: list[tuple[HandleRef, Handle]] = [
            *((known, serving[made]) for made, known in held),
            *((known, collection) for known in self._collections),
            *((known, world) for known in self._worlds if world is not None),
        ]
        return ((old, new) for old, new in pairs if old() is not None and old() is not new)

    def live_references(self, own: set[int]) -> list[str]:
        """Describe the holders; see :meth:`megapg.ownership.session.Session.live_references`.

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
                name = shortened(communicator.fields)
                found += [f"{name}: {line}" for line in holders(group, own)]
        for collection in collections:
            found += [f"the collection: {line}" for line in holders(collection, own)]
        return found


def holders(target: object, known: set[int]) -> Iterator[str]:
    """Describe each object that refers to ``target``, by class and attribute or by key.

    Uses Python's garbage collector. Frames, torch's own tables of groups, and ``known`` are left
    out. A dict or tuple that holds only groups and plain values is not found, because the collector
    does not track it.

    Args:
        target: the object.
        known: ids of referrers to leave out.
    """
    for holder in gc.get_referrers(target):
        if isinstance(holder, FrameType) or id(holder) in known or id(holder) in _tables():
            continue
        names = _names(holder, target)
        if isinstance(holder, dict):
            owner = next((o for o in gc.get_referrers(holder) if _is_dict_of(holder, o)), None)
            yield _attribute(owner, names) if owner is not None else f"a dict, under {names}"
        elif isinstance(holder, CellType):
            yield _closure(holder)
        else:
            yield _attribute(holder, names) if names else f"a {_kind(holder)}"


def _tables() -> set[int]:
    """Return the ids of the containers in which torch registers groups."""
    # isinstance() reads ``__class__`` of the value, which makes one of torch's objects warn.
    tables = [value for value in torch_private.tables() if issubclass(type(value), (dict, list))]
    inner = [v for table in tables if isinstance(table, dict) for v in table.values()]
    return {id(table) for table in (*tables, *inner)}


def _names(holder: object, target: object) -> str:
    held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return ", ".join(str(name) for name, value in held.items() if value is target)


def _is_dict_of(held: object, owner: object) -> bool:
    if isinstance(owner, type):  # a class shows only a view of its dict
        return any(part is held for part in gc.get_referents(owner))
    return getattr(owner, "__dict__", None) is held


def _attribute(owner: object, names: str) -> str:
    name = f"a {_kind(owner)}"
    if isinstance(owner, ModuleType):
        name = owner.__name__
    elif isinstance(owner, type):
        name = f"{owner.__module__}.{owner.__qualname__}"
    return f"{name}, as {names}"


def _closure(cell: CellType) -> str:
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(function, FunctionType) and id(function.__closure__) == id(closure):
                # Compare by identity: ``==`` of cells compares their contents, which may raise.
                named = zip(function.__code__.co_freevars, closure, strict=True)
                name = next(name for name, each in named if each is cell)
                return f"the closure of {function.__module__}.{function.__qualname__}, as {name}"
    return "a local variable that functions share"


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
