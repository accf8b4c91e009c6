"""What has certainly run before what, within one function: enough to move a read, or to trust a
variable.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from megapg.migrate.scopes import Parents, Use

_OWN_SCOPE = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly in a function or a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block:
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def statements_around(parents: Parents, function: ast.AST) -> list[ast.stmt]:
    """The statements of a function around an expression, from the outside in."""
    found = []
    for each in parents:
        if each is function:
            break
        if isinstance(each, ast.stmt):
            found.append(each)
    return found[::-1]


def runs_before(statement: ast.stmt, around: Sequence[ast.stmt], function: ast.AST) -> bool:
    """Whether a statement of a function has run whenever an expression is evaluated.

    Args:
        statement: somewhere in the function.
        around: the statements around the expression, from the outside in.
        function: the function's node.
    """
    outer: ast.AST = function
    for each in around:
        for block in blocks(outer):
            if any(each is other for other in block):
                if any(statement is other for other in block[: _position(block, each)]):
                    return not isinstance(statement, ast.For | ast.AsyncFor | ast.While)
                break
        if each is statement:  # a loop's or with's variable, in its body
            return isinstance(each, ast.For | ast.AsyncFor | ast.With | ast.AsyncWith)
        outer = each
    return False


def _position(block: Sequence[ast.stmt], statement: ast.stmt) -> int:
    return next(i for i, other in enumerate(block) if other is statement)


def binding_statements(function: ast.AST, name: str) -> Iterator[ast.stmt]:
    """The statements of a function, nested ones included, that bind a name when they run."""
    waiting = [statement for block in blocks(function) for statement in block]
    while waiting:
        statement = waiting.pop()
        if name in _bound_by(statement):
            yield statement
        if not isinstance(statement, _OWN_SCOPE):
            waiting += [inner for block in blocks(statement) for inner in block]


def _bound_by(statement: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.For | ast.AsyncFor | ast.AnnAssign):
        if not isinstance(statement, ast.AnnAssign) or statement.value is not None:
            targets = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        targets = [item.optional_vars for item in statement.items if item.optional_vars]
    return {
        node.id
        for target in targets
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def is_certain(node: ast.AST, parents: Parents, statement: ast.stmt) -> bool:
    """Whether an expression of a statement is evaluated whenever the statement runs."""
    inner = node
    for outer in parents:
        if isinstance(outer, _OWN_SCOPE | _Comprehension):
            return False
        if isinstance(outer, ast.IfExp) and inner is not outer.test:
            return False
        if isinstance(outer, ast.BoolOp) and inner is not outer.values[0]:
            return False
        if isinstance(outer, ast.Compare) and inner in outer.comparators[1:]:
            return False
        if isinstance(outer, ast.Assert) and inner is not outer.test:
            return False
        if outer is statement:
            return not any(inner is each for block in blocks(outer) for each in block) and (
                not isinstance(outer, ast.Try) and not isinstance(inner, ast.ExceptHandler)
            )
        if isinstance(outer, ast.match_case | ast.ExceptHandler):
            return False
        inner = outer
    return False


def common_block(
    chains: Sequence[Sequence[ast.stmt]], function: ast.AST
) -> tuple[list[ast.stmt], int] | None:
    """The innermost block of a function that has several expressions in it, and the index of the
    first statement there with one of them.

    Args:
        chains: the statements around each expression, from the outside in, none empty.
        function: the function's node.
    """
    outer: ast.AST = function
    depth = 0
    best = None
    while all(len(chain) > depth for chain in chains):
        here = [chain[depth] for chain in chains]
        block = next(
            (b for b in blocks(outer) if all(any(s is o for o in b) for s in here)),
            None,
        )
        if block is None:
            break
        best = block, min(_position(block, statement) for statement in here)
        if any(statement is not here[0] for statement in here):
            break
        outer, depth = here[0], depth + 1
    return best


def first_read(function: ast.AST, uses: Sequence[Use]) -> ast.stmt | None:
    """The statement before which something can be looked up that several uses need: one that has
    all others behind it, in its block, and certainly makes one of the uses itself. None where there
    is none, or nothing can be put before it.
    """
    chains = [statements_around(use.parents, function) for use in uses]
    found = common_block(chains, function) if all(chains) else None
    if found is None or isinstance(function, ast.Lambda):
        return None
    block, position = found
    first = block[position]
    if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return None
    for use, chain in zip(uses, chains, strict=True):
        if first in chain and is_certain(use.node, use.parents, first):
            return first
    return None
