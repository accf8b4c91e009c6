"""What an owner has handed out, remembered without keeping it alive, and who still holds it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from types import CellType, FrameType, FunctionType, ModuleType
from typing import TypeAlias

import torch.distributed as dist

from megapg import torch_private
from megapg.collection import ProcessGroupCollection
from megapg.communicators.plan import Communicator, shortened

Handle: TypeAlias = dist.ProcessGroup | ProcessGroupCollection
HandleRef: TypeAlias = weakref.ref[dist.ProcessGroup] | weakref.ref[ProcessGroupCollection]


class References:
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
        """Who holds any of them; see :meth:`megapg.ownership.session.Session.live_references`.

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
    """Describe what refers to ``target``: by class and attribute, or by key. Asks the collector.

    Frames, torch's own tables of groups, and what is in ``known`` are left out. A dict or a tuple
    with nothing but groups and plain values in it goes unseen: the collector does not track it.

    Args:
        target: the object.
        known: ids of referrers that are nobody's business.
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
    """Ids of the containers in which torch registers groups."""
    # By type, since isinstance() asks the value, and one of torch's then warns of itself.
    tables = [value for value in torch_private.tables() if issubclass(type(value), (dict, list))]
    inner = [v for table in tables if isinstance(table, dict) for v in table.values()]
    return {id(table) for table in (*tables, *inner)}


def _names(holder: object, target: object) -> str:
    held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return ", ".join(str(name) for name, value in held.items() if value is target)


def _is_dict_of(held: object, owner: object) -> bool:
    if isinstance(owner, type):  # shows a view of it
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
                # By identity: cells are equal where what is in them says so, or raises.
                named = zip(function.__code__.co_freevars, closure, strict=True)
                name = next(name for name, each in named if each is cell)
                return f"the closure of {function.__module__}.{function.__qualname__}, as {name}"
    return "a local variable that functions share"


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
