"""Variables that hold what has had its day: the statement that asks gives them another value, or
the groups were made anew since they got theirs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.find.index import Index
from megapg.migrate.python.flow import (
    LOOP,
    Held,
    Holding,
    blocks,
    bound_by,
    statements_around,
)
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import Scope, Use, children_of


@dataclass(frozen=True)
class Renewals:
    """Where the functions of a project have the groups made or ended, be it by way of others.

    Args:
        index: the project.
        makes_groups: whether a function of a file does so.
    """

    index: Index
    makes_groups: Callable[[Scope | None, Path], bool]

    @kept
    def outdate(self, expression: str, use: Use, path: Path) -> bool:
        """Whether a variable holds what is not the one about which something is asked."""
        found = use.scope.find(expression)
        if found is None or expression in found[0].instances:
            return False
        function = found[0].node
        around = statements_around(use.parents, function)
        if not around:
            return False
        if expression in bound_by(around[-1]) and not _reads(around[-1], expression):
            return True
        calls = self._calls(use.scope.unit, path)
        ways = (statements_around(each.parents, function) for each in calls)
        making = {way[-1] for way in ways if way}
        last = _Lasting(expression, lambda value: False, Held.SOMETHING, making)
        return bool(making) and last.at(around, function) is not Held.SOMETHING

    @kept
    def lines(self, path: Path, function: Scope) -> Sequence[range]:
        """The lines of a function in which the groups may be made anew: of a loop, which may come
        round again, all.
        """
        found = []
        for each in self._calls(function.unit, path):
            if each.scope.enclosing("function") is function:
                around = statements_around(each.parents, function.node)
                outer = next((one for one in around if isinstance(one, LOOP)), each.node)
                found.append(range(outer.lineno, (outer.end_lineno or outer.lineno) + 1))
        return found

    @kept
    def _calls(self, unit: Scope | None, path: Path) -> Sequence[Use]:
        """The calls of a function that make the groups."""
        analysis = self.index.analysis(path) if self.makes_groups(unit, path) else None
        calls = analysis.calls.get(unit, ()) if analysis is not None else ()
        return [use for use, _ in calls if self._is_of_a_maker(use, path)]

    def _is_of_a_maker(self, use: Use, path: Path) -> bool:
        return any(
            each.kind == "function" and self.makes_groups(each.scope, each.path)
            for each in self.index.resolver.expression(use.node, use.scope, path)
            if each.path is not None
        )


def _reads(statement: ast.stmt, name: str) -> bool:
    """Whether a statement reads a variable, those in its blocks apart: the value goes through it,
    be it wrapped.
    """
    inner = [each for block in blocks(statement) for each in block]
    waiting: list[ast.AST] = [statement]
    for each in waiting:  # grows
        if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load):
            return True
        waiting += [e for e in children_of(each) if e not in inner]
    return False


@dataclass(frozen=True)
class _Lasting(Holding):
    """Follows whether a variable holds something of the groups that there are: when these are made
    anew, it holds nothing of theirs until it is bound again.
    """

    making: Collection[ast.stmt] = ()

    def _on_entering(self, outer: ast.AST, block: list[ast.stmt], held: Held) -> Held:
        return super()._on_entering(outer, block, Held.NOTHING if outer in self.making else held)

    def _after(self, statement: ast.stmt, held: Held) -> Held:
        return super()._after(statement, Held.NOTHING if statement in self.making else held)
