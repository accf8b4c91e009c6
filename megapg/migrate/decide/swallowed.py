"""Uses that only the globals serve, in a ``try`` that swallows every error. Where the globals are
forbidden, the error that says so would be swallowed as well, and the code would go another way
without a word. So Megatron's call stays.
"""

from __future__ import annotations

import ast

from megapg.errors import NoCollectionError
from megapg.migrate.decide.decisions import Base, Plan
from megapg.migrate.migration import Left
from megapg.migrate.python.flow import TRY, statements_in
from megapg.migrate.python.scopes import FunctionNode, Use, last_name

_CATCHING = frozenset(each.__name__ for each in NoCollectionError.__mro__)
_DETAIL = (
    "a try around it swallows the error where the globals are forbidden: Megatron's call stays"
)


def without_what_is_swallowed(plan: Plan) -> Plan:
    """A plan with such uses left. They ask the globals as they did: what all others ask does not
    depend on it.
    """
    decisions = []
    for each in plan.decisions:
        if _is_of_globals(each.base) and _is_swallowed(each.located.use):
            site = each.located.site
            plan.left.append(Left(site, "unchecked", _DETAIL, site.replacement))
        else:
            decisions.append(each)
    plan.decisions = decisions
    return plan


def _is_of_globals(base: Base) -> bool:
    """Whether the globals are read, and nothing that was passed: to ask whether there are any
    raises nothing.
    """
    return base.form == "resolve" and base.expression == "None"


def _is_swallowed(use: Use) -> bool:
    """Whether a ``try`` of the function around swallows the error that a use raises."""
    inner: ast.AST = use.node
    for outer in use.parents:
        if isinstance(outer, FunctionNode | ast.Lambda):
            return False  # it runs later
        if isinstance(outer, TRY) and any(inner is each for each in outer.body):
            handler = next(filter(_catches, outer.handlers), None)
            if handler is not None and not _raises(handler):
                return True
        inner = outer
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(each is None or last_name(each) in _CATCHING for each in caught)


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(each, ast.Raise) for each in statements_in(handler))
