"""Which functions a call runs that were handed on as values: to the function that calls them by a
parameter, by ``functools.partial``, or back by a function that returns them.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.edit.lacking import OF_GROUPS, named_in
from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import Resolver, Thing
from megapg.migrate.python.flow import statements_in
from megapg.migrate.python.methods import kept, parameters, passed, self_of
from megapg.migrate.python.scopes import Alias, Opaque, Scope, Use, is_named, last_name

# Further than anybody hands a function on.
_DEEPEST = 4

Calls = Mapping[Scope | None, Sequence[tuple[Use, ast.Call]]]
"""What is called in a file, by the functions that do."""


@dataclass(frozen=True)
class Values:
    """Finds the functions that are handed on in the new texts of a project."""

    index: Index
    resolver: Resolver
    calls_in: Callable[[Path], Calls]

    def handed_back(self, use: Use, call: ast.Call, path: Path) -> Iterator[tuple[Thing, ast.Call]]:
        """The functions that a call runs since another one returns them, to a variable or to be
        called at once; and the call that does.
        """
        above = use.parents.above
        outer = above.node if above is not None else None
        if isinstance(outer, ast.Call) and outer.func is call:
            yield from ((each, outer) for each in self._returned(call, use.scope, path, 0))
        yield from ((each, call) for each in self._returned(use.node, use.scope, path, 0))

    def _returned(self, node: ast.expr, scope: Scope, path: Path, depth: int) -> Iterator[Thing]:
        """The functions that an expression stands for since others of the project return them."""
        if isinstance(node, ast.Name) and depth < _DEEPEST:
            _, bound = scope.find(node.id) or (scope, ())
            for each in bound:
                if isinstance(each, Alias) and isinstance(each.value, ast.Name | ast.Call):
                    yield from self._returned(each.value, each.scope, path, depth + 1)
        elif isinstance(node, ast.Call):
            for of in self.resolver.expression(node.func, scope, path):
                if of.kind == "function" and of.scope is not None and of.path is not None:
                    yield from self._returned_by(of.scope, of.path, depth)

    @kept
    def _returned_by(self, function: Scope, path: Path, depth: int) -> list[Thing]:
        """The functions that one returns; but those in it, which ask what it does."""
        found: list[Thing] = []
        for each in statements_in(function.node):
            if isinstance(each, ast.Return) and each.value is not None:
                found += in_order(self.resolver.expression(each.value, function, path))
                if depth < _DEEPEST:
                    found += self._returned(each.value, function, path, depth + 1)
        return [each for each in found if each.kind == "function" and _is_unit(each.scope)]

    def handed_to(self, use: Use, path: Path) -> list[Thing]:
        """What a function that is called by a parameter may be, as the source hands it on."""
        owner = _parameter(use.node, use.scope)
        return [] if owner is None else self._given(*owner, path, 0)

    def handed_by(self, use: Use, call: ast.Call, path: Path) -> Iterator[Thing]:
        """The functions that a call hands to a function of the project which calls them, or hands
        them on to one that does.
        """
        for thing in self.resolver.expression(use.node, use.scope, path):
            if thing.kind != "function" or thing.scope is None or thing.path is None:
                continue
            for name, given in passed(thing.scope, call).items():
                if self._runs(thing.scope, name, thing.path, 0):
                    yield from self._things(given, use, path)
                    further = _parameter(given, use.scope)
                    yield from self._given(*further, path, 0) if further is not None else ()

    def kept_by(self, use: Use, call: ast.Call, path: Path) -> list[Thing]:
        """The functions that a call hands to an object which it makes: that calls them later."""
        made = self.resolver.expression(use.node, use.scope, path)
        given = _given_by(call) if any(each.kind == "class" for each in made) else ()
        handed = (thing for each in given for thing in self._things(each, use, path))
        return [each for each in handed if each.kind == "function"]

    @kept
    def _runs(self, function: Scope, name: str, path: Path, depth: int) -> bool:
        """Whether a function calls what it is passed for one of its parameters, be it by others."""
        is_one = any(each.arg == name for each in parameters(function.node))
        calls = self.calls_in(path).get(function, ()) if is_one else ()
        if any(_runs_it(use, call, name) for use, call in calls):
            return True
        return depth < _DEEPEST and any(
            self._runs(thing.scope, parameter, thing.path, depth + 1)
            for use, call in calls
            if any(is_named(each, name) for each in _given_by(call))
            for thing in self.resolver.expression(use.node, use.scope, path)
            if thing.kind == "function" and thing.scope is not None and thing.path is not None
            for parameter, given in passed(thing.scope, call).items()
            if is_named(given, name)
        )

    def bound(self, use: Use, call: ast.Call, path: Path) -> Iterator[Thing]:
        """The functions of which a call is ``functools.partial``, be it of a parameter."""
        if _is_partial(call):
            yield from self._things(call.args[0], use, path)
            owner = _parameter(call.args[0], use.scope)
            yield from self._given(*owner, path, 0) if owner is not None else ()

    def _things(self, node: ast.expr | None, use: Use, path: Path) -> Iterator[Thing]:
        if isinstance(node, ast.Call) and _is_partial(node):
            node = None if _passes_groups(node, use) else node.args[0]
        for each in self.resolver.expression(node, use.scope, path) if node is not None else ():
            if each.kind in ("function", "class"):
                yield each
        yield from self._returned(node, use.scope, path, 0) if node is not None else ()

    @kept
    def _given(self, function: Scope, name: str, path: Path, depth: int) -> list[Thing]:
        """What the calls of a function give for one of its parameters."""
        return list(self._find_given(function, name, path, depth))

    def _find_given(self, function: Scope, name: str, path: Path, depth: int) -> Iterator[Thing]:
        for file in self.index.everywhere(function.name) if depth < _DEEPEST else ():
            if self.index.modules.is_test(file):
                continue
            for calls in self.calls_in(file).values():
                for use, call in calls:
                    if last_name(use.node) != function.name or not any(
                        each.scope is function
                        for each in self.resolver.expression(use.node, use.scope, file)
                    ):
                        continue
                    given = passed(function, call).get(name)
                    yield from self._things(given, use, file)
                    further = _parameter(given, use.scope)
                    if further is not None and further[0] is not function:
                        yield from self._given(*further, file, depth + 1)


def in_order(things: Collection[Thing]) -> list[Thing]:
    """What a name may stand for: the first is reported, which is what takes most parameters."""
    return sorted(things, key=_place) if len(things) > 1 else [*things]


def _place(thing: Thing) -> tuple[int, str, int]:
    if thing.scope is None:
        return 0, str(thing.path or ""), 0
    node = thing.scope.node
    return -len(parameters(node)), str(thing.path or ""), getattr(node, "lineno", 0)


def _given_by(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _is_partial(call: ast.Call) -> bool:
    return last_name(call.func) == "partial" and bool(call.args)


def _runs_it(use: Use, call: ast.Call, name: str) -> bool:
    """Whether a call is one of a parameter, or binds it, and passes it no groups."""
    is_one = is_named(use.node, name) or (_is_partial(call) and is_named(call.args[0], name))
    return is_one and not _passes_groups(call, use)


def _passes_groups(call: ast.Call, use: Use) -> bool:
    return not OF_GROUPS.isdisjoint(named_in(call, use.scope.unit))


def _is_unit(function: Scope | None) -> bool:
    return function is not None and function.unit is function


def _parameter(node: ast.expr | None, scope: Scope) -> tuple[Scope, str] | None:
    """The free function of which an expression is a parameter, and the parameter's name."""
    found = scope.find(node.id) if isinstance(node, ast.Name) else None
    if found is None or not isinstance(node, ast.Name):
        return None
    owner, bound = found
    is_one = len(bound) == 1 and isinstance(bound[0], Opaque) and bound[0].parameter
    is_free = owner.kind == "function" and owner.parent is not None
    return (owner, node.id) if is_one and is_free and not self_of(owner) else None
