"""Variables that hold what has had its day: the statement that asks gives them another value, or
the groups were made anew since they got theirs.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megapg.migrate.python.flow import (
    LOOP,
    Held,
    Holding,
    binding_statements,
    blocks,
    statements_around,
)
from megapg.migrate.python.scopes import Use, children_of


def is_outlived(name: str, use: Use, making: Sequence[Use]) -> bool:
    """Whether what a variable holds is not the one about which something is asked.

    Args:
        name: of the variable.
        use: the place that asks.
        making: the calls of its function that make or end the groups, be it by way of others.
    """
    found = use.scope.find(name)
    if found is None or name in found[0].instances or found[0].kind != "function":
        return False
    function = found[0].node
    around = statements_around(use.parents, function)
    if not around:
        return False
    if around[-1] in binding_statements(function, name) and not _reads(around[-1], name):
        return True
    ways = (statements_around(each.parents, function) for each in making)
    last = _Lasting(name, lambda value: False, Held.SOMETHING, {way[-1] for way in ways if way})
    return last.at(around, function) is not Held.SOMETHING


def last_line_of(making: Use, function: ast.AST) -> int:
    """The last line that has run when a call has made the groups: in a loop, which may come round
    again, that of the loop.
    """
    around = statements_around(making.parents, function)
    last = next((each for each in around if isinstance(each, LOOP)), making.node)
    return last.end_lineno or last.lineno


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
