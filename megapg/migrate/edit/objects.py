"""What the objects of a class are asked in the new texts. A method that asks nothing itself goes
with what the other methods of its object ask.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.edit.mixing import CONSTRUCTOR, PASSED, TextOfFile
from megapg.migrate.edit.shared import Shared
from megapg.migrate.find.axes import axes_of
from megapg.migrate.find.filled import is_filled
from megapg.migrate.find.meaning import Resolver, Thing
from megapg.migrate.python.methods import class_of, kept, self_of
from megapg.migrate.python.scopes import Alias, FunctionNode, Scope, Use, last_name

# Further than anybody gives a value other names.
_DEEPEST = 4


def methods_of(klass: Scope) -> Iterator[Scope]:
    """The functions that a class defines."""
    for name in klass.bindings:
        yield from (each for each in klass.defined(name) if each.kind == "function")


@dataclass(frozen=True)
class Objects:
    """Finds what is asked of them."""

    resolver: Resolver
    text_of: Callable[[Path], TextOfFile | None]
    shared: Shared

    def asked_beside(self, method: Scope, path: Path) -> Mapping[str, tuple[Scope, Path]]:
        """About which kinds of groups the object of a method is asked, and a method that does. What
        a constructor is passed is what its object has.
        """
        klass = method.parent
        is_one = klass is not None and klass.kind == "class" and bool(self_of(method))
        return self._asked(klass, path) if klass is not None and is_one else {}

    def bases(self, klass: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        """What a class is made of, as far as that is in the project."""
        for base in getattr(klass.node, "bases", ()) if klass.parent is not None else ():
            for thing in self.resolver.expression(base, klass.parent or klass, path):
                if thing.kind == "class" and thing.scope is not None and thing.path is not None:
                    yield thing.scope, thing.path

    def constructor(self, klass: Scope, path: Path, depth: int = 0) -> list[tuple[Scope, Path]]:
        """The constructor of a class, be it inherited."""
        own = [(each, path) for each in klass.defined(CONSTRUCTOR)]
        if own or depth > _DEEPEST:
            return own
        found = (self.constructor(each, at, depth + 1) for each, at in self.bases(klass, path))
        return next((each for each in found if each), [])

    def run_by(self, things: Iterable[Thing]) -> Iterator[tuple[Scope, Path]]:
        """What runs where some things are called: of a class its constructor."""
        for each in things:
            if each.scope is None or each.path is None:
                continue
            if each.kind == "function":
                yield each.scope, each.path
            elif each.kind == "class":
                yield from self.constructor(each.scope, each.path)

    def methods_called(self, use: Use, path: Path) -> Iterator[tuple[Scope, Path, str]]:
        """The methods that a call runs of an object which was made beside it, or comes from a
        function that says of which class it is; and the class of one that can't have been handed
        the collection that is there: no argument goes to the function, or to the constructor, and
        no attribute of it is set.
        """
        owner = use.node.value if isinstance(use.node, ast.Attribute) else None
        for klass, at, empty in self._made(owner, use.scope, path, 0) if owner is not None else ():
            for each, where in self._line(klass, at):
                if methods := each.defined(last_name(use.node)):
                    is_set = isinstance(owner, ast.Name) and is_filled(owner.id, use.scope)
                    of = "" if is_set else empty
                    yield from ((one, where, of) for one in methods if self_of(one))
                    break

    def _made(
        self, value: ast.expr, scope: Scope, path: Path, depth: int
    ) -> Iterator[tuple[Scope, Path, str]]:
        """The classes of which a value is, as far as that is written."""
        if isinstance(value, ast.Name) and depth < _DEEPEST:
            _, bound = scope.find(value.id) or (scope, ())
            aliases = [each for each in bound if isinstance(each, Alias)]
            for each in aliases if len(aliases) == len(bound) else ():
                yield from self._made(each.value, each.scope, path, depth + 1)
        if not isinstance(value, ast.Call):
            return
        empty = not (value.args or value.keywords)
        for thing in self.resolver.expression(value.func, scope, path):
            of, at = thing.scope, thing.path
            if of is None or at is None or of.parent is None:
                continue
            if thing.kind == "class":
                yield of, at, of.qualname if empty else ""
            said = getattr(of.node, "returns", None) if thing.kind == "function" else None
            for one in self.resolver.expression(said, of.parent, at) if said is not None else ():
                if one.kind == "class" and one.scope is not None and one.path is not None:
                    yield one.scope, one.path, one.scope.qualname if empty else ""

    def are_of_one(self, method: Scope, other: Scope, path: Path) -> bool:
        """Whether a method is one of the object of another one, and no constructor."""
        klass = other.parent
        line = self._line(klass, path) if klass is not None and klass.kind == "class" else ()
        return class_of(method) is None and any(method.parent is each for each, _ in line)

    @kept
    def _line(self, klass: Scope, path: Path) -> list[tuple[Scope, Path]]:
        """A class and what it is made of."""
        line = [(klass, path)]
        for each, at in line:  # grows
            line += [base for base in self.bases(each, at) if base not in line]
        return line

    @kept
    def _asked(self, klass: Scope, path: Path) -> Mapping[str, tuple[Scope, Path]]:
        found: dict[str, tuple[Scope, Path]] = {}
        for each, at in self._line(klass, path):
            text = self.text_of(at)
            if text is None:
                continue
            for method in methods_of(each):
                of_it = ("self", PASSED) if method.name == CONSTRUCTOR else ("self",)
                asked = text.asked_by(method.node) if isinstance(method.node, FunctionNode) else ()
                for asking in asked:
                    if asking.carrier in of_it and not asking.by_core:
                        for axis in axes_of(asking.what):
                            found.setdefault(axis, (method, at))
                for axis in self.shared.asked(method, at) if self_of(method) else ():
                    found.setdefault(axis, (method, at))
        return found
