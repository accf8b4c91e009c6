"""What runs only where a collection, or a model, is None: the project's own fallback."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence

from megapg.migrate.find.carriers import MODEL_NAMES
from megapg.migrate.python.flow import blocks
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import Scope, walk
from megapg.upstream.mapping import COLLECTION_NAMES

_MAY_BE_NONE = frozenset({*COLLECTION_NAMES, *MODEL_NAMES})


def for_none(node: ast.AST, names: Collection[str] = _MAY_BE_NONE) -> Iterator[tuple[str, ast.AST]]:
    """What in a node runs only where a variable of some names, a collection or a model, is None,
    and its name: a branch, and what stands behind one that has left where it is not None.
    """
    if isinstance(node, ast.IfExp) and (said := _says_none(node.test, names)):
        yield said[0], node.body if said[1] else node.orelse
    for block in blocks(node) if isinstance(node, ast.stmt) else ():
        for at, each in enumerate(block):
            said = _says_none(each.test, names) if isinstance(each, ast.If) else None
            if isinstance(each, ast.If) and said is not None:
                without, other = (each.body, each.orelse)[:: 1 if said[1] else -1]
                yield from ((said[0], inner) for inner in without)
                if other and isinstance(other[-1], ast.Return | ast.Raise):
                    yield from ((said[0], behind) for behind in block[at + 1 :])


def in_place_of(unit: Scope, names: Sequence[str]) -> set[int]:
    """What in a function runs only where a variable of some names is None."""
    return {
        id(inner)
        for each in unit.nodes
        for _, branch in for_none(each, names)
        for inner in walk(branch)
    }


@kept
def lines_in_place_of(unit: Scope, name: str) -> set[int]:
    """The lines of what a function does only where a parameter for a group is None."""
    standing = [branch for each in unit.nodes for _, branch in for_none(each, (name,))]
    standing += [
        each
        for each in unit.nodes
        if isinstance(each, ast.BoolOp)
        and isinstance(each.op, ast.Or)
        and isinstance(each.values[0], ast.Name)
        and each.values[0].id == name
    ]
    placed = (each for each in standing if isinstance(each, ast.stmt | ast.expr))
    return {line for e in placed for line in range(e.lineno, (e.end_lineno or e.lineno) + 1)}


def _says_none(test: ast.expr, names: Collection[str]) -> tuple[str, bool] | None:
    """The variable of some names about which a test says that it is None (true), or not (false)."""
    match test:
        case ast.Name(name):
            return (name, False) if name in names else None
        case ast.UnaryOp(ast.Not(), operand):
            inner = _says_none(operand, names)
            return None if inner is None else (inner[0], not inner[1])
        case ast.BoolOp(operator, parts):  # all have the outcome, if they have this one
            outcome = isinstance(operator, ast.And)
            found = (_says_none(each, names) for each in parts)
            said = (each for each in found if each and each[1] is outcome)
            return next(said, None)
        case ast.Compare(ast.Name(name)) if name in names:
            other = test.comparators[0]
            is_compared = isinstance(other, ast.Constant) and other.value is None
            return (name, isinstance(test.ops[0], ast.Is | ast.Eq)) if is_compared else None
    return None
