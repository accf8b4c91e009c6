"""Where instances of each class keep their references, and which instances can be changed."""

from __future__ import annotations

import logging
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megapg import torch_private
from megapg.collection import Lease, ProcessGroupCollection
from megapg.communicators.needed import Communicator
from megapg.ownership.rebind.paths import ATTRIBUTE, ITEM, KEY, PART
from megapg.ownership.rebind.replacements import Replacements
from megapg.ownership.steps import Steps
from megapg.rendezvous.store import Store
from megapg.torch_private.meshes import FINDING_NEW_GROUPS

# Instances of exactly these types refer to nothing of interest.
LEAVES = frozenset(
    {int, float, complex, bool, bytes, bytearray, range, type(None), type(...), type}
    | {types.ModuleType, types.CodeType, types.FrameType, types.TracebackType}
    | {torch.dtype, torch.device, torch.Size, torch.Generator, torch.layout, torch.memory_format}
)

# megapg's own classes are frozen for users, but the walk may write to them.
_OURS = f"{__name__.partition('.')[0]}."

# Instances of these are not entered. Collections that get here are views of the globals.
_CLOSED = (
    *(type, types.ModuleType, logging.Filterer, logging.Manager),
    *(ProcessGroupCollection, Lease, Replacements),
    *FINDING_NEW_GROUPS,
)
# The packages of owners and their parts, each found by one of its classes.
_CLOSED_HOMES = tuple(
    kind.__module__.rpartition(".")[0] + "." for kind in (Steps, Communicator, Store)
)

# Packages of classes whose instances keep more than the group: values computed from it.
_MADE_OF_GROUPS = ("torch.distributed.", "torch.nn.parallel.", "deep_ep.")
# The exception: a module whose classes read the group at each use.
_ASKING_THE_GROUP = torch_private.FSDP_ASKS
# Modules whose classes torch mixes into users' module classes. Their state is kept separately.
_MIXED_IN = ("torch.distributed.fsdp.", torch_private.FSDP_MIXES_IN)

CONTAINERS = (dict, list, set, deque)
_IMMUTABLES = frozenset(
    {tuple, frozenset, types.MethodType, weakref.ref, weakref.KeyedRef, ProcessGroupCollection}
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The places where instances of a class keep references."""

    namespace: types.GetSetDescriptorType | None
    slots: tuple[types.MemberDescriptorType, ...]
    closed: bool
    sealed: str  # why instances, and containers in them, can't be changed
    opened: bool  # True if instances can be changed, whatever holds them
    frozen: str  # why attributes can't be changed


def shape_of(kind: type) -> Shape:
    """Return the shape of a class, from the class alone."""
    mro = kind.__mro__
    homes = [f"{base.__module__}." for base in mro]
    spaces = (vars(base).get("__dict__") for base in mro)
    # Skip a property called __dict__: it would run code and return another dict.
    namespace = next((s for s in spaces if isinstance(s, types.GetSetDescriptorType)), None)
    slots = tuple(
        value
        for base in mro
        if "__slots__" in vars(base)
        for value in vars(base).values()
        if isinstance(value, types.MemberDescriptorType)
    )
    sealed = frozen = ""
    opened = homes[0] == _ASKING_THE_GROUP
    if not opened and any(
        home.startswith(_MADE_OF_GROUPS) and home not in _MIXED_IN for home in homes
    ):
        sealed = (
            f"{kind.__module__}.{kind.__qualname__} keeps what it made of the group; make it anew"
        )
    parameters = getattr(kind, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen and not homes[0].startswith(_OURS):
        frozen = (
            f"{kind.__qualname__} is a frozen dataclass; make it anew with dataclasses.replace()"
        )
    closed = issubclass(kind, _CLOSED) or any(home.startswith(_CLOSED_HOMES) for home in homes)
    return Shape(namespace, slots, closed, sealed, opened, frozen)


def is_rebuilt(value: object) -> bool:
    """True if the value is immutable, but can be rebuilt with other parts."""
    kind = type(value)
    if kind in _IMMUTABLES:
        return True
    return issubclass(kind, tuple) and kind.__dictoffset__ == 0  # a namedtuple


def parts_of(item: object) -> Iterator[tuple[int, object, object]]:
    """Yield the parts of a value that is rebuilt: kind of step, key, part."""
    if isinstance(item, tuple):
        names = getattr(type(item), "_fields", None)
        for index, part in enumerate(item):
            yield (ITEM, index, part) if names is None else (ATTRIBUTE, names[index], part)
    elif isinstance(item, frozenset):
        for part in item:
            yield KEY, part, part
    elif isinstance(item, types.MethodType):
        yield ATTRIBUTE, "__self__", item.__self__
        yield ATTRIBUTE, "__func__", item.__func__
    elif isinstance(item, weakref.ref):
        yield PART, "weakref", item()
        if isinstance(item, weakref.KeyedRef):
            yield PART, "key", item.key
    elif isinstance(item, ProcessGroupCollection):
        for name, part in (*vars(item).items(), *item._extras.items()):
            yield ATTRIBUTE, name, part


def with_parts(item: object, parts: list[Any]) -> object:
    """Rebuild a value with other parts, in the order of :func:`parts_of`."""
    if isinstance(item, tuple):
        return tuple.__new__(type(item), parts)
    if isinstance(item, frozenset):
        return frozenset(parts)
    if isinstance(item, types.MethodType):
        return types.MethodType(parts[1], parts[0])
    if isinstance(item, weakref.KeyedRef):
        return weakref.KeyedRef(parts[0], item.__callback__, parts[1])
    if isinstance(item, weakref.ref):
        return weakref.ref(parts[0], item.__callback__)
    assert isinstance(item, ProcessGroupCollection)
    groups = dict(zip(vars(item), parts, strict=False))
    extras = dict(zip(item._extras, parts[len(groups) :], strict=True))
    return ProcessGroupCollection(groups, item._members, item.lease, item.layout, extras)
