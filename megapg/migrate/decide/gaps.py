"""What the collections certainly have that functions are passed: one that a caller fills by hand
lacks the other groups.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from megapg.migrate.find.filled import CLASSES, fields_handed_on, least
from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import ONLY_UNKNOWN, Thing
from megapg.migrate.find.sites import Carrier
from megapg.migrate.python.methods import class_of, kept, parameters, passed
from megapg.migrate.python.scopes import Scope, Use, is_named, last_name, scopes
from megapg.upstream.mapping import COLLECTION_NAMES

_Parameter: TypeAlias = tuple[Scope, str]
_Function: TypeAlias = tuple[Scope, Path]


@dataclass(frozen=True)
class _Handed:
    """A collection that a call passes."""

    value: ast.expr
    keyword: str  # by which it is; empty where it is by its place
    use: Use  # what is called
    call: ast.Call
    path: Path  # of its file


@dataclass(frozen=True)
class Gaps:
    """Finds out which groups that is certain to have what functions are passed in a project."""

    index: Index

    def told(self, carrier: Carrier, use: Use, path: Path) -> Carrier:
        """What is in scope at a use, with the fields that it certainly has where it is passed."""
        if carrier.kind != "collection" or carrier.origin not in ("parameter", "inner"):
            return carrier
        found = use.scope.find(carrier.expression)
        fields = self._passed.get((found[0], carrier.expression)) if found is not None else None
        return replace(carrier, fields=least([carrier.fields, fields]))

    @cached_property
    def _passed(self) -> Mapping[_Parameter, frozenset[str]]:
        """What all that may be passed for a parameter certainly have, of those for which functions
        of the project pass what these fill, or are passed so.
        """
        found: dict[_Parameter, frozenset[str]] = {}
        waiting = list(self._filled())
        for handed, fields in waiting:  # grows
            for function, path, name in self._passed_to(handed):
                known = found.get((function, name), fields)
                if (function, name) not in found or not known <= fields:
                    found[function, name] = known & fields
                    further = self._handed_on_by(function, path)
                    waiting += [(e, known & fields) for e in further if is_named(e.value, name)]
        return found

    def _filled(self) -> Iterator[tuple[_Handed, frozenset[str]]]:
        """What functions of the source pass that certainly has some fields, and no others."""
        for path in dict.fromkeys(chain(*map(self.index.everywhere, sorted(CLASSES)))):
            analysis = None if self.index.modules.is_test(path) else self.index.analysis(path)
            for unit in analysis.calls if analysis is not None else ():
                for each in self._handed_on_by(unit, path):
                    scope, resolver = each.use.scope, self.index.resolver
                    fields = fields_handed_on(each.value, scope, path, resolver)
                    if fields is not None:
                        yield each, fields

    def _handed_on_by(self, unit: Scope | None, path: Path) -> Iterator[_Handed]:
        """The collections that a function passes."""
        analysis = self.index.analysis(path)
        for use, call in analysis.calls.get(unit, ()) if analysis is not None else ():
            for each in call.keywords:
                if each.arg in COLLECTION_NAMES:
                    yield _Handed(each.value, each.arg, use, call, path)
            for value in call.args:
                if isinstance(value, ast.Name) and value.id in COLLECTION_NAMES:
                    yield _Handed(value, "", use, call, path)

    def _passed_to(self, handed: _Handed) -> Iterator[tuple[Scope, Path, str]]:
        """The parameters for which a collection is, or may be, passed, and their files."""
        use, at = handed.use, handed.path
        things = self.index.resolver.expression(use.node, use.scope, at)
        for thing in things:
            for function, path in _functions_of(thing):
                for name, value in passed(function, handed.call).items():
                    if value is handed.value:
                        yield function, path, name
        called = last_name(use.node)
        if things == ONLY_UNKNOWN and handed.keyword and not called.startswith("__"):
            for function, path in self._handed_on_as(called):
                if any(each.arg == handed.keyword for each in parameters(function.node)):
                    yield function, path, handed.keyword

    @kept
    def _handed_on_as(self, called: str) -> Sequence[_Function]:
        """The functions that may be what is called by a name that tells nobody: methods of that
        name, and what is handed on where the name is known.
        """
        named = self._taking.get(called, ())
        found = [(e, at) for e, at in named if e.parent is not None and e.parent.kind == "class"]
        for at in self.index.everywhere(called):
            analysis = None if self.index.modules.is_test(at) else self.index.analysis(at)
            for use in analysis.uses if analysis is not None else ():
                outer, name = use.parents.node, last_name(use.node)
                is_called = isinstance(outer, ast.Call) and outer.func is use.node
                if name in self._taking and not is_called:
                    for thing in self.index.resolver.expression(use.node, use.scope, at):
                        found += _functions_of(thing)
        return found

    @cached_property
    def _taking(self) -> Mapping[str, Sequence[_Function]]:
        """The functions that take a collection, of constructors by the names of their classes."""
        found: dict[str, list[_Function]] = defaultdict(list)
        for path in dict.fromkeys(chain(*map(self.index.everywhere, COLLECTION_NAMES))):
            analysis = self.index.analysis(path)
            for each in scopes(analysis.module) if analysis is not None else ():
                if any(one.arg in COLLECTION_NAMES for one in parameters(each.node)):
                    found[(class_of(each) or each).name].append((each, path))
        return found


def _functions_of(thing: Thing) -> Iterator[_Function]:
    """The function that a thing is; of a class its constructor."""
    scope, path = thing.scope, thing.path
    if scope is not None and path is not None and thing.kind in ("function", "class"):
        found = [scope] if thing.kind == "function" else scope.defined("__init__")
        yield from ((each, path) for each in found)
