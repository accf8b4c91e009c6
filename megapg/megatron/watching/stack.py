"""Finds the nearest frame on the stack that carries a group for a field.

A frame carries a group if one of its variables holds a collection, or a group under Megatron's name
for it (``tp_group``). Attributes of ``self``, ``ctx`` and ``cls`` count like variables. A model in
a variable, or a list of chunks, counts with its own ``pg_collection``. No user code runs, and
submodules are not searched.

The search ends at a frame that was running when the innermost ``published()`` or
``allow_global_reads()`` was entered: the block was entered later than the frame got its groups.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, MemberDescriptorType
from typing import NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist

from megapg.collection import ProcessGroupCollection
from megapg.megatron.core import BRIDGE, COLLECTIONS
from megapg.torch_private import SUBMODULES
from megapg.upstream.mapping import COLLECTION_NAMES, GROUP_PARAMETERS, MODEL_ATTRIBUTES

Callers: TypeAlias = tuple[tuple[int, int], ...]
"""Id and calling instruction of each caller of a frame, the nearest first.

A generator or coroutine is always the last, because others may resume it.
"""

Running: TypeAlias = Mapping[int, tuple[CodeType, Callers]]
"""The frames that ran at some moment: id -> code and callers. Frames would keep their locals alive.
"""

# Frames of torch and Python's own library carry no groups, and there are many.
_TORCH, _LIBRARY = f"{os.path.dirname(torch.__file__)}{os.sep}", sysconfig.get_path("stdlib")
# In these modules collections and groups have known names, so other variables are skipped.
_KNOWN_NAMES = "megatron.core"
_NAMES = frozenset((*COLLECTION_NAMES, *GROUP_PARAMETERS, "_tp_group"))
# Classes of these modules hold no collection, and have many attributes.
_PLAIN_CLASSES = ("builtins", "torch", _KNOWN_NAMES)
_MOST = 10_000  # code objects that a search remembers
_OBJECTS = ("self", "ctx", "cls")
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

# name -> the fields of which it may hold the group
SINGLE_GROUPS: Mapping[str, tuple[str, ...]] = {
    **GROUP_PARAMETERS,
    "_tp_group": GROUP_PARAMETERS["tp_group"],
}
_NAMES_OF: Mapping[str, tuple[str, ...]] = {
    field: (*COLLECTION_NAMES, *(name for name, known in SINGLE_GROUPS.items() if field in known))
    for fields in SINGLE_GROUPS.values()
    for field in fields
}


class Carried(NamedTuple):
    """A group that a frame carries for a field."""

    group: object  # None if the collection says that this rank is in no such group
    holder: object  # the collection that holds it, or None
    variable: str  # as the frame spells it: "pg", "self.tp_group"
    single: str  # the name under which it is a single group; empty if a collection holds it
    frame: FrameType


class _Kind(enum.Enum):
    OTHER = enum.auto()
    COLLECTION = enum.auto()
    SEVERAL = enum.auto()  # Megatron-core's collections of several modules
    MODEL = enum.auto()
    GROUP = enum.auto()


@dataclass(frozen=True, slots=True)
class _Look:
    """The variables in frames of one code object that may carry a group."""

    code: CodeType  # kept, so that its id stays its own
    names: tuple[str, ...] | None  # None: all variables
    objects: tuple[str, ...]
    chunks: tuple[str, ...]  # variables that may hold a list of model chunks


def running() -> Running:
    """Return the frames that run now."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    found: dict[int, tuple[CodeType, Callers]] = {}
    callers: Callers = ()
    for each in reversed(frames):
        found[id(each)] = each.f_code, callers
        suspends = each.f_code.co_flags & _SUSPENDS
        callers = ((id(each), each.f_lasti), *(() if suspends else callers))
    return found


def _runs_on(frame: FrameType, running: Running) -> bool:
    """Return True if ``frame`` is one of those that were running, and none that reuses its id.

    While a frame runs, none of its callers moves on. A generator or a coroutine stays the same
    frame while it is suspended.
    """
    code, callers = running[id(frame)]
    if frame.f_code is not code:
        return False
    if code.co_flags & _SUSPENDS:
        return True
    caller = frame.f_back
    for known in callers:
        if caller is None or (id(caller), caller.f_lasti) != known:
            return False
        caller = caller.f_back
    return True


class Search:
    """Searches stacks. It remembers what it learnt of each code object and each class."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._looks: dict[int, _Look | None] = {}
        self._passed: list[CodeType] = []  # kept, so that their ids stay their own
        self._kinds: dict[type, _Kind] = {}
        self._others: set[type] = set()  # classes whose values carry no group

    def nearest(
        self, frame: FrameType | None, field: str, stops: Sequence[Running]
    ) -> list[Carried] | None:
        """Return the groups that the nearest frame carries for ``field``; None if a stop comes
        first.

        The list is empty if no frame carries a group.
        """
        looks, others = self._looks, self._others
        while frame is not None:
            code = frame.f_code
            try:
                look = looks[id(code)]
            except KeyError:
                look = self._learn(code, frame)
            if look is not None:
                for stop in stops:
                    if id(frame) in stop and _runs_on(frame, stop):
                        return None
                variables = frame.f_locals
                found: list[Carried] = []
                try:
                    # Most frames carry nothing, so they get the cheapest test that says so.
                    plain = look.names is None and others.issuperset(map(type, variables.values()))
                    if not plain or look.objects or look.chunks:
                        self._look_into(variables, look, field, frame, found, plain=plain)
                except TypeError:  # a class that has no hash
                    found.clear()
                # Before Python 3.13 the frame keeps this dictionary, and so all values in it. Three
                # references: ours, the frame's and the call's. With more, code has called locals().
                if (
                    type(variables) is dict
                    and code.co_flags & inspect.CO_OPTIMIZED
                    and sys.getrefcount(variables) == 3
                ):
                    variables.clear()
                if found:
                    return found
            frame = frame.f_back
        return []

    def _look_into(
        self,
        variables: Mapping[str, object],
        look: _Look,
        field: str,
        frame: FrameType,
        found: list[Carried],
        *,
        plain: bool,
    ) -> None:
        if not plain:
            self._add_held(found, variables, look.names, field, "", frame)
        for name in look.objects:
            if name in variables:
                self._add_attributes(found, name, variables[name], field, frame)
        for name in look.chunks:
            chunks = variables.get(name)
            if type(chunks) in (list, tuple) and chunks:
                first = {f"{name}[0]": cast("Sequence[object]", chunks)[0]}
                self._add_held(found, first, None, field, "", frame)

    def _learn(self, code: CodeType, frame: FrameType) -> _Look | None:
        if len(self._looks) > _MOST:  # generated code may be endless
            self._forget()
        home, file = str(frame.f_globals.get("__name__", "")), code.co_filename
        library = file.startswith((_LIBRARY, "<frozen ")) and "-packages" not in file
        look = None
        if not library and not file.startswith(_TORCH) and not home.startswith(f"{BRIDGE}."):
            variables = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
            objects = tuple(name for name in _OBJECTS if name in variables)
            chunks = tuple(name for name in variables if name in MODEL_ATTRIBUTES)
            names: tuple[str, ...] | None = None
            if home.startswith(_KNOWN_NAMES):
                names, chunks = tuple(name for name in variables if name in _NAMES), ()
            elif code.co_flags & inspect.CO_OPTIMIZED and not variables:
                names = ()
            if names != () or objects:
                look = _Look(code, names, objects, chunks)
        if look is None:
            self._passed.append(code)
        self._looks[id(code)] = look
        return look

    def _add_attributes(
        self, found: list[Carried], name: str, value: object, field: str, frame: FrameType
    ) -> None:
        known_names = type(value).__module__.startswith(_KNOWN_NAMES)
        names = _NAMES_OF.get(field, COLLECTION_NAMES) if known_names else None
        for held in _attributes(value):
            self._add_held(found, held, names, field, f"{name}.", frame)

    def _add_held(
        self,
        found: list[Carried],
        held: Mapping[str, object],
        names: tuple[str, ...] | None,
        field: str,
        prefix: str,
        frame: FrameType,
    ) -> None:
        kinds, others = self._kinds, self._others
        if names is None:
            names = tuple(name for name, value in held.items() if type(value) not in others)
        for name in names:
            value = held.get(name)
            kind = kinds.get(type(value)) or self._kind(type(value))
            if kind is _Kind.OTHER:
                continue
            if kind is _Kind.GROUP:
                if name in _NAMES_OF.get(field, ()):
                    found.append(Carried(value, None, f"{prefix}{name}", name, frame))
                continue
            spelled = f"{prefix}{name}"
            if kind is _Kind.MODEL:
                value, spelled = _collection_of(value), f"{spelled}.pg_collection"
                if (kinds.get(type(value)) or self._kind(type(value))) is not _Kind.COLLECTION:
                    continue
            for pg in _collections(value) if kind is _Kind.SEVERAL else (value,):
                group = _group(pg, field)
                if group is not _ABSENT:
                    found.append(Carried(group, pg, spelled, "", frame))

    def _kind(self, kind: type) -> _Kind:
        """Return the kind of group holder that values of a class are."""
        found = _Kind.OTHER
        for each in kind.__mro__:
            if each is ProcessGroupCollection and kind.__module__ == each.__module__:
                found = _Kind.COLLECTION  # other subclasses stand for the globals
            elif each is dist.ProcessGroup:
                found = _Kind.GROUP
            elif each is torch.nn.Module:
                found = _Kind.MODEL
            elif each.__module__ == COLLECTIONS:
                several = each.__name__.startswith("MultiModule")
                found = _Kind.SEVERAL if several else _Kind.COLLECTION
        self._kinds[kind] = found
        if found is _Kind.OTHER:
            self._others.add(kind)
        return found


_ABSENT = object()


def _group(pg: object, field: str) -> object:
    held = cast("Mapping[str, object]", vars(pg))
    if field in held:
        group = held[field]
        if group is None:  # in Megatron-core's own collection it may mean anything
            outside = isinstance(pg, ProcessGroupCollection) and field in ("embd", "pos_embd")
            return None if outside else _ABSENT
        return group
    if isinstance(pg, ProcessGroupCollection):
        return pg._extras.get(field, _ABSENT)  # also for groups of the parent process
    return _ABSENT


def _collections(several: object) -> list[object]:
    held = vars(several).get("module_pgs")
    return list(held.values()) if isinstance(held, dict) else []


def _collection_of(model: object) -> object:
    """Return the ``pg_collection`` of a model, or of the model that it wraps; None without one."""
    while model is not None:
        held = _namespace(model)
        if "pg_collection" in held:
            return held["pg_collection"]
        submodules = held.get(SUBMODULES)
        model = submodules.get("module") if isinstance(submodules, dict) else None
    return None


def _attributes(value: object) -> Iterator[Mapping[str, object]]:
    """Yield the attributes of an object, or of a class, that can be read without its code."""
    if issubclass(type(value), type):  # isinstance() may run code of the value
        yield dict(vars(value))
        return
    yield _namespace(value)
    for kind in type(value).__mro__:
        if not kind.__module__.startswith(_PLAIN_CLASSES):
            yield vars(kind)
            if "__slots__" in vars(kind):
                yield dict(_in_slots(value, kind))


def _namespace(value: object) -> Mapping[str, object]:
    try:
        plain: object = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return plain if isinstance(plain, dict) else {}


def _in_slots(value: object, kind: type) -> Iterator[tuple[str, object]]:
    for name, slot in vars(kind).items():
        if isinstance(slot, MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # the slot is empty
                yield name, slot.__get__(value)
