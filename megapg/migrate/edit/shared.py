"""What functions ask about the collection of another one, which hands it on to them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.edit.mixing import PASSED, TextOfFile
from megapg.migrate.edit.values import Calls
from megapg.migrate.find.axes import axes_of
from megapg.migrate.find.meaning import Resolver
from megapg.migrate.python.methods import class_of, is_self, kept, self_of
from megapg.migrate.python.scopes import Alias, FunctionNode, Scope, is_named, last_name
from megapg.upstream.mapping import COLLECTION_NAMES

# Further than anybody hands a collection on.
_DEEPEST = 4


@dataclass(frozen=True)
class Shared:
    """Follows the collections that are handed on in the new texts of a project."""

    resolver: Resolver
    text: Callable[[Path], TextOfFile | None]
    calls_in: Callable[[Path], Calls]

    @kept
    def asked(self, unit: Scope, path: Path, depth: int = 0) -> frozenset[str]:
        """About which kinds of groups functions are asked to which one hands what it was passed, or
        what its object has. What is made with a collection asks for itself.
        """
        found = frozenset[str]()
        for use, call in self.calls_in(path).get(unit, ()) if depth < _DEEPEST else ():
            if not any(self._is_its(each.value, unit) for each in _collections(call)):
                continue
            for thing in self.resolver.expression(use.node, use.scope, path):
                if thing.kind == "function" and thing.scope is not None and thing.path is not None:
                    found |= self._asks(thing.scope, thing.path)
                    found |= self.asked(thing.scope, thing.path, depth + 1)
        return found

    def _asks(self, function: Scope, path: Path) -> frozenset[str]:
        text, node = self.text(path), function.node
        if text is None or not isinstance(node, FunctionNode):
            return frozenset()
        asked = [each for each in text.asked_by(node) if each.carrier in COLLECTION_NAMES]
        return frozenset[str]().union(*(axes_of(each.what) for each in asked if not each.by_core))

    def _is_its(self, given: ast.expr, unit: Scope) -> bool:
        """Whether an expression is the collection of a function, be it resolved."""
        if isinstance(given, ast.Attribute):
            return given.attr in COLLECTION_NAMES and is_self(given.value, unit)
        if not isinstance(given, ast.Name) or (self_of(unit) and class_of(unit) is None):
            return False  # what a method is passed is not its object's
        if given.id in COLLECTION_NAMES:
            return given.id in unit.bindings
        bound = unit.bindings.get(given.id, ())
        return any(isinstance(each, Alias) and _is_resolved(each.value) for each in bound)


def _collections(call: ast.Call) -> Iterator[ast.keyword]:
    yield from (each for each in call.keywords if each.arg in COLLECTION_NAMES)


def _is_resolved(value: ast.expr) -> bool:
    if not isinstance(value, ast.Call) or last_name(value.func) != "resolve":
        return False
    return any(is_named(each, PASSED) for each in value.args)
