"""The walk over objects that puts new groups where old ones were."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from megapg import torch_private
from megapg.ownership.rebind.paths import (
    ATTRIBUTE,
    ITEM,
    KEY,
    MODULES,
    PART,
    ROOT,
    SAME,
    TELLING,
    Path,
)
from megapg.ownership.rebind.replacements import Replacements
from megapg.ownership.rebind.shapes import (
    CONTAINERS,
    LEAVES,
    Shape,
    is_rebuilt,
    parts_of,
    shape_of,
    with_parts,
)

_Queue: TypeAlias = deque[tuple[Path, object, str]]
_Visitor: TypeAlias = "Callable[[Walk, Path, Any, str], None]"


@dataclass(slots=True)
class _Rebuilt:
    """An immutable value and its replacement, which is the value itself if nothing changes."""

    old: object  # kept alive, so that its id stays unique
    new: object
    inside: list[Path]  # replaced references inside it that are not yet counted


class Walk:
    """One call of :func:`rebind`: a breadth-first walk, so that paths are short.

    For readable paths, submodules come first, and dicts with objects as keys last.
    """

    def __init__(self, replacements: Replacements) -> None:
        self._new_for = replacements.get
        self._names = replacements.names
        self._queues: tuple[_Queue, _Queue, _Queue] = (deque(), deque(), deque())
        self._seen: dict[int, object] = {}  # kept alive, so that ids stay unique
        self._rebuilt: dict[int, _Rebuilt] = {}
        self._shapes: dict[type, Shape] = {}
        self._visitors: dict[type, _Visitor | None] = {}
        self.replaced: list[Path] = []
        self.left: list[tuple[Path, str]] = []
        self.holders: set[int] = set()  # ids of the holders of references in ``left``

    def over(self, objects: Sequence[object]) -> None:
        """Walk until no new object is found."""
        for path, root in _roots(objects):
            new, inside = self._stand_in(path, root, "")
            if new is not root:
                why = "passed to rebind() itself; it takes what holds groups"
                self.left += [(step, why) for step in inside]
                self.holders |= {id(objects), id(root)}
        while queue := next(filter(None, self._queues), None):
            path, node, sealed = queue.popleft()
            if queue is not self._queues[2] and _is_by_object(node):
                self._queues[2].append((path, node, sealed))
            else:
                self._visit(path, node, sealed)

    def _visit(self, path: Path, node: object, sealed: str) -> None:
        shape = self._shape_of(type(node))
        if shape.closed:
            return
        sealed = "" if shape.opened else sealed or shape.sealed
        visit = self._visitor_of(type(node), shape)
        if visit is not None:
            visit(self, path, node, sealed)
        self._attributes(path, node, shape, sealed)

    # -- what a node refers to -------------------------------------------------------------------

    def _attributes(self, path: Path, node: object, shape: Shape, sealed: str) -> None:
        why = sealed or shape.frozen
        if shape.namespace is not None:
            namespace = shape.namespace.__get__(node)
            modules = issubclass(type(node), torch.nn.Module)
            if isinstance(namespace, dict):
                for name, value in list(namespace.items()):
                    if type(value) in LEAVES:
                        continue
                    write = partial(namespace.__setitem__, name)
                    step = MODULES if name == torch_private.SUBMODULES and modules else ATTRIBUTE
                    self._slot(path, step, name, value, node, why, write, sealed)
        for slot in shape.slots:
            try:
                value = slot.__get__(node)
            except AttributeError:  # unset
                continue
            write = partial(slot.__set__, node)
            self._slot(path, ATTRIBUTE, slot.__name__, value, node, why, write, sealed)

    def _dict(self, path: Path, node: dict[object, object], sealed: str) -> None:
        if _is_module(node):
            return
        # bypasses methods of subclasses
        of = OrderedDict if issubclass(type(node), OrderedDict) else dict
        keys: dict[object, object] = {}
        for key, value in list(of.items(node)):
            if type(value) not in LEAVES:
                write = partial(of.__setitem__, node, key)
                self._slot(path, ITEM, key, value, node, sealed, write)
            if type(key) not in LEAVES:
                self._slot(path, KEY, key, key, node, sealed, partial(keys.__setitem__, key))
        if keys:
            items = [(keys.get(key, key), value) for key, value in of.items(node)]
            of.clear(node)
            of.update(node, items)
        if isinstance(node, defaultdict):
            write = partial(setattr, node, "default_factory")
            factory = node.default_factory
            self._slot(path, ATTRIBUTE, "default_factory", factory, node, sealed, write)

    def _list(self, path: Path, node: list[object] | deque[object], sealed: str) -> None:
        of: Any = list if issubclass(type(node), list) else deque
        for index, value in enumerate(node):
            if type(value) not in LEAVES:
                write = partial(of.__setitem__, node, index)
                self._slot(path, ITEM, index, value, node, sealed, write)

    def _set(self, path: Path, node: set[object], sealed: str) -> None:
        def swap(value: object, new: object) -> None:
            set.discard(node, value)
            set.add(node, new)

        for value in list(node):
            self._slot(path, KEY, value, value, node, sealed, partial(swap, value))

    def _fixed(self, path: Path, node: tuple[object, ...] | frozenset[object], sealed: str) -> None:
        why = f"a {_kind(node)} can't be changed, and has attributes that a copy would lack"
        for index, value in enumerate(node):
            self._slot(path, ITEM, index, value, node, why, None, sealed)

    def _cell(self, path: Path, cell: types.CellType, sealed: str) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            return
        write = partial(setattr, cell, "cell_contents")
        self._slot(path, SAME, None, value, cell, "", write)

    def _function(self, path: Path, function: types.FunctionType, sealed: str) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._slot(path, ATTRIBUTE, name, cell, function, "", None)
        for name in ("__defaults__", "__kwdefaults__"):
            write = partial(setattr, function, name)
            self._slot(path, ATTRIBUTE, name, getattr(function, name), function, "", write)

    def _partial(self, path: Path, node: partial[object], sealed: str) -> None:
        def write(name: str, value: object) -> None:
            held = {"func": node.func, "args": node.args, "keywords": node.keywords, name: value}
            node.__setstate__((*held.values(), vars(node) or None))  # type: ignore[attr-defined]

        for name in ("func", "args", "keywords"):
            value = getattr(node, name)
            self._slot(path, ATTRIBUTE, name, value, node, "", partial(write, name))

    def _tensor(self, path: Path, tensor: torch.Tensor, sealed: str) -> None:
        for name in torch_private.HOOKS_OF_TENSORS:
            self._slot(path, ATTRIBUTE, name, getattr(tensor, name), tensor, "", None)

    def _cache(self, path: Path, cache: object, sealed: str) -> None:
        why = "a cache; call its cache_clear()"
        for value in gc.get_referents(cache):
            self._slot(path, PART, _kind(value), value, cache, why, None)

    def _graph(self, path: Path, graph: object, sealed: str) -> None:
        self.left.append((path, "a CUDA graph replays what it captured; capture it anew"))

    def _unknown(self, path: Path, node: object, sealed: str) -> None:
        """Visit an object of unknown type: Python's garbage collector lists its references."""
        why = f"a {_kind(node)} can't be changed; make it anew"
        for value in gc.get_referents(node):
            self._slot(path, PART, _kind(value), value, node, why, None, sealed)

    # -- one reference ---------------------------------------------------------------------------

    def _slot(
        self,
        path: Path,
        kind: int,
        key: object,
        value: object,
        holder: object,
        why: str,
        write: Callable[[object], object] | None,
        sealed: str | None = None,
    ) -> None:
        """Look at one reference, and replace it if needed.

        Args:
            path: the path of the holder.
            kind: the kind of step from the holder to the value.
            key: the key of that step.
            value: the object referred to.
            holder: the object that refers to it.
            why: the reason if the reference can't be replaced.
            write: stores another value there.
            sealed: the reason if containers in ``value`` can't be changed. Default: ``why``.
        """
        here = Path(path, kind, key)
        new, inside = self._stand_in(here, value, why if sealed is None else sealed)
        if new is value:
            return
        if not why and write is not None:
            try:
                write(new)
            except (AttributeError, TypeError, ValueError) as error:
                why = str(error)
            else:
                self.replaced += inside
                return
        self.left += [(step, why or "it can't be changed") for step in inside]
        self.holders |= {id(holder), id(value)}
        namespace = self._shape_of(type(holder)).namespace
        if namespace is not None:
            self.holders.add(id(namespace.__get__(holder)))

    def _stand_in(self, path: Path, value: object, sealed: str) -> tuple[object, Sequence[Path]]:
        """Return the replacement of a value (or the value), and the references that this replaces.

        A mutable value is queued, to be visited later.
        """
        if type(value) in LEAVES:
            return value, ()
        if type(value) is str:
            if value in self._names and (sealed or not value.isdigit()):
                self.left.append((path, f"{value!r} is the name of an old group"))
            return value, ()
        new = self._new_for(value)
        if new is not None:
            return new, (path,)
        if not is_rebuilt(value):
            self._later(path, value, sealed)
            return value, ()
        if id(value) not in self._rebuilt:
            self._rebuild(path, value, sealed)
        known = self._rebuilt[id(value)]
        if known.new is value:
            return value, ()
        inside, known.inside = known.inside or [path], []
        return known.new, inside

    def _rebuild(self, path: Path, value: object, sealed: str) -> None:
        """Compute the replacement of an immutable value: its parts first, then the value."""
        stack = [(path, value, False)]
        while stack:
            path, item, entered = stack.pop()
            if id(item) in self._rebuilt:
                continue
            parts = [(Path(path, kind, key), part) for kind, key, part in parts_of(item)]
            if not entered:
                stack.append((path, item, True))
                stack += [(p, part, False) for p, part in parts if self._is_to_rebuild(part)]
                continue
            stand_ins = [self._stand_in(p, part, sealed) for p, part in parts]
            inside = [step for _, steps in stand_ins for step in steps]
            new = item
            if any(new is not part for (new, _), (_, part) in zip(stand_ins, parts, strict=True)):
                try:
                    new = with_parts(item, [new for new, _ in stand_ins])
                except TypeError as error:
                    self.left += [(step, str(error)) for step in inside]
                    self.holders.add(id(item))
            self._rebuilt[id(item)] = _Rebuilt(item, new, inside)

    def _is_to_rebuild(self, value: object) -> bool:
        return is_rebuilt(value) and self._new_for(value) is None

    def _later(self, path: Path, value: object, sealed: str) -> None:
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            # Containers in a sealed object are sealed too. Other objects in it are not.
            sealed = sealed if issubclass(type(value), CONTAINERS) else ""
            self._queues[not path.by_modules()].append((path, value, sealed))

    def _visitor_of(self, kind: type, shape: Shape) -> _Visitor | None:
        if kind not in self._visitors:
            found = next((visit for base, visit in _VISITORS if issubclass(kind, base)), None)
            if found is None and shape.namespace is None and not shape.slots:
                found = Walk._unknown
            self._visitors[kind] = found
        return self._visitors[kind]

    def _shape_of(self, kind: type) -> Shape:
        shape = self._shapes.get(kind)
        if shape is None:
            shape = self._shapes[kind] = shape_of(kind)
        return shape


# In order of precedence: the first base class that matches decides.
_VISITORS: tuple[tuple[type, _Visitor], ...] = (
    (dict, Walk._dict),
    (list, Walk._list),
    (deque, Walk._list),
    (set, Walk._set),
    (tuple, Walk._fixed),
    (frozenset, Walk._fixed),
    (types.CellType, Walk._cell),
    (types.FunctionType, Walk._function),
    (partial, Walk._partial),
    (functools._lru_cache_wrapper, Walk._cache),
    (torch.Tensor, Walk._tensor),
    (torch.cuda.CUDAGraph, Walk._graph),
)


def _is_by_object(node: object) -> bool:
    """True if the keys of a dict are objects, which makes the path hard to read."""
    return type(node) is dict and type(next(iter(node), "")) not in TELLING


def _is_module(namespace: dict[object, object]) -> bool:
    name = namespace.get("__name__")
    return type(name) is str and getattr(sys.modules.get(name), "__dict__", None) is namespace


def _kind(value: object) -> str:
    return type(value).__name__


def _roots(objects: Sequence[object]) -> Iterator[tuple[Path, object]]:
    """Name each object by its class, with a number if there are several of the class."""
    kinds = Counter(map(_kind, objects))
    met: Counter[str] = Counter()
    for root in objects:
        name = _kind(root)
        met[name] += 1
        yield Path(None, ROOT, f"{name}#{met[name]}" if kinds[name] > 1 else name), root
