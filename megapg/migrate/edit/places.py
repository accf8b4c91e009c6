"""The places of a function that ask for a collection, and which of them one collection serves."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from megapg.migrate.decide.decisions import Decision, Passing
from megapg.migrate.python.flow import (
    blocks,
    common_block,
    first_read,
    is_certain,
    is_dead,
    statements_around,
    statements_in,
)
from megapg.migrate.python.scopes import FunctionNode, Scope, last_name
from megapg.upstream.mapping import Takes

# What each model is built with. Who has a pipeline's group has those of its embeddings, be they
# None; the others are left out of a collection where a model has no use for them.
_OF_EACH_MODEL = frozenset({"tp", "pp", "mp", "cp", "dp", "dp_cp", "embd", "pos_embd"})


@dataclass(frozen=True, eq=False)
class LookUp:
    """A variable that is to have a collection."""

    before: ast.stmt  # where it is bound
    needs: tuple[str, ...]  # the fields that are asked for
    members: tuple[Decision | Passing, ...]  # who reads it


class Place:
    """A place that asks for a collection."""

    def __init__(self, what: Decision | Passing) -> None:
        self.what, self.base = what, what.base
        if isinstance(what, Decision):
            self.use, self.needs = what.located.use, what.answer.needs
            is_lazy = what.answer.takes is Takes.LAZY
        else:
            self.use, self.needs, is_lazy = what.reference.use, what.needs, False
        self.line = self.use.node.lineno
        self.is_looked_up = self.base.form != "plain" and not what.as_read
        # What carries it may lack what it asks for.
        self.is_apart = is_lazy and self.base.form == "groups_of"

    def may_have_a_variable(self, around: Scope) -> bool:
        """Whether a variable may be bound for it, where a function, or a script alone, runs it."""
        if around.kind == "function":
            return not is_dead(self.around(around.node), around.node)
        first = next(iter(self.around(around.node)), None)
        is_script = isinstance(first, ast.If) and "__name__" in map(last_name, _parts(first.test))
        return around.kind == "module" and is_script

    def is_served_by(self, fields: Collection[str]) -> bool:
        """Whether what has some fields has all that it asks for."""
        if self.base.form == "resolve":
            return True
        lacking = {*self.needs} - {*fields}
        return not self.is_apart and not lacking - (
            set() if self.base.of_a_part else _OF_EACH_MODEL
        )

    def is_served_behind(self, look_up: LookUp, function: Scope) -> bool:
        """Whether a look-up in the function around its own serves it; one of what a part of a model
        carries does where it comes to that.
        """
        if self.is_served_by(look_up.needs):
            return True
        all_parts = {*look_up.needs, *(self.needs if {*self.needs} <= _OF_EACH_MODEL else ())}
        return self.is_served_by(all_parts) and self._is_called_behind(look_up.before, function)

    def _is_called_behind(self, before: ast.stmt, function: Scope) -> bool:
        """Whether the function that it is in is called in the block of a statement, or behind."""
        own = self.use.scope.enclosing("function")
        block = next((b for b in blocks_in(function) if before in b), [])
        return own is not None and _calls(own.name, block[block.index(before) :] if block else [])

    def around(self, function: ast.AST) -> list[ast.stmt]:
        """The statements of a function around it, from the outside in."""
        return statements_around(self.use.parents, function)


def of_one_collection(function: Scope, places: Sequence[Place]) -> Iterator[list[Place]]:
    """The places that one collection serves. What a model carries has to have all fields that are
    asked for; so it is not asked, for those who may not come to it, for what it may lack.
    """
    apart: dict[tuple[str, ...], list[Place]] = {}
    for each in places:
        if each.is_apart:
            apart.setdefault(tuple(each.needs), []).append(each)
    yield from apart.values()
    places = [each for each in places if not each.is_apart]
    if not places:
        return
    first = first_read(function.node, [each.use for each in places])
    needed: set[str] = set()
    if first is not None:
        chains = [each.around(function.node) for each in places]
        depth = next(chain.index(first) for chain in chains if first in chain) + 1
        inner = {id(each) for each, it in zip(places, chains, strict=True) if len(it) > depth}
        needed = {need for each in places if id(each) not in inner for need in each.needs}
    groups: dict[frozenset[str], list[Place]] = {}
    for each in places:
        lacking = {*each.needs} - needed
        if not each.base.of_a_part or first is not None:
            lacking -= _OF_EACH_MODEL
        special = frozenset(lacking) if each.base.form == "groups_of" else frozenset()
        groups.setdefault(special, []).append(each)
    main = groups.pop(frozenset(), [])
    bare = [] if any(each.needs for each in main) else main  # they take what the others look up
    if main and not bare:
        yield main
    rest = [each for some in groups.values() for each in some]
    if main and first_read(function.node, [each.use for each in rest]) is not None:
        yield from of_one_collection(function, rest)
    else:
        yield from sorted(_merged(function, groups.values()), key=lambda each: -len(each))
    if bare:
        yield bare


def _merged(function: Scope, groups: Iterable[list[Place]]) -> list[list[Place]]:
    """Some groups of places, those as one of which each certainly asks, in one block."""
    found: list[list[list[Place]]] = []
    for group in groups:
        for others in found:
            if _are_read_together(function, [*others, group]):
                others.append(group)
                break
        else:
            found.append([group])
    return [[place for group in each for place in group] for each in found]


def _are_read_together(function: Scope, groups: Sequence[Sequence[Place]]) -> bool:
    places = [place for group in groups for place in group]
    chains = {i: each.around(function.node) for i, each in enumerate(places)}
    common = common_block(chains, function.node)
    if common is None:
        return False
    certain = {
        id(place)
        for place, chain in zip(places, chains.values(), strict=True)
        if len(chain) == common.depth + 1
        and is_certain(place.use.node, place.use.parents, chain[-1])
    }
    statements = [each for each, _ in common.runs]
    lines = range(statements[0].lineno, statements[-1].lineno)
    leaves = any(
        isinstance(each, ast.Return | ast.Raise | ast.Break | ast.Continue) and each.lineno in lines
        for each in statements_in(common.outer)
    )
    return not leaves and all(any(id(place) in certain for place in each) for each in groups)


def _parts(test: ast.expr) -> list[ast.expr]:
    """The sides of a comparison."""
    return [test.left, *test.comparators] if isinstance(test, ast.Compare) else []


def _calls(name: str, block: Sequence[ast.stmt]) -> bool:
    """Whether statements call a function by its name, whichever of their branches are taken."""
    for each in block:
        if isinstance(each, ast.If) and _calls(name, each.body) and _calls(name, each.orelse):
            return True
        if not isinstance(each, FunctionNode | ast.ClassDef) and not any(blocks(each)):
            called = (e.func for e in ast.walk(each) if isinstance(e, ast.Call))
            if any(last_name(of) == name for of in called):
                return True
    return False


def blocks_in(function: Scope) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a function."""
    return (each for at in function.nodes for each in blocks(at))
