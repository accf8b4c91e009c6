"""Where in a function a new variable may be bound for a collection, and how long it is that."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megapg.migrate.python.methods import shown_until
from megapg.migrate.python.scopes import Scope


@dataclass(frozen=True)
class Spans:
    """The parts of functions in which the groups are the same.

    Args:
        renewals: the lines of a function in which the groups may be made anew.
    """

    renewals: Callable[[Scope], Sequence[range]]

    def of(self, line: int, function: Scope) -> int | None:
        """In which one a line is; None where it is in none, or something sees later on all
        variables that there are.
        """
        renewals = self.renewals(function)
        if line <= shown_until(function) or any(line in each for each in renewals):
            return None
        return sum(each.stop <= line for each in renewals)

    def has(self, span: int, function: Scope, statement: ast.stmt) -> bool:
        """Whether a statement begins in a span of a function."""
        return self.of(statement.lineno, function) == span
