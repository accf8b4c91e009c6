"""What has certainly run before what, within one function: enough to move a read, or to trust a
variable.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from megapg.migrate.scopes import Parents, Use, last_name, walk

_OWN_SCOPE = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_LOOP = ast.For | ast.AsyncFor | ast.While
_WITH = ast.With | ast.AsyncWith
_TRY = ast.Try | ast.TryStar
# Contexts that end with the error of their body; others may swallow it.
_NO_SUPPRESSORS = frozenset(
    {"no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "device"}
    | {"nullcontext", "open", "init_empty_weights"}
)
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


class Held(IntEnum):
    """What a variable holds for certain."""

    UNBOUND = 0  # it may be that there is no such variable as yet
    NOTHING = 1  # it may be what stands for nothing as yet
    SOMETHING = 2


@dataclass(frozen=True)
class Holding:
    """Follows what a variable of a function holds.

    Args:
        name: of the variable.
        is_nothing: whether a value that it is given stands for nothing as yet.
        at_first: what it holds where the function begins.
    """

    name: str
    is_nothing: Callable[[ast.expr], bool]
    at_first: Held = Held.UNBOUND

    def at(self, around: Sequence[ast.stmt], function: ast.AST) -> Held:
        """What it holds when an expression is evaluated.

        Args:
            around: the statements around the expression, from the outside in.
            function: the function's node.
        """
        held, outer = self.at_first, function
        for each in around:
            block = next((b for b in blocks(outer) if any(each is other for other in b)), None)
            if block is None:
                return Held.UNBOUND
            held = self._on_entering(outer, block, held)
            held = self._after_all(block[: _position(block, each)], held)
            outer = each
        return held

    def _on_entering(self, outer: ast.AST, block: list[ast.stmt], held: Held) -> Held:
        """What it holds at the beginning of one of the blocks of a statement."""
        if isinstance(outer, _LOOP):
            if self.name in _bound_by(outer) and block is outer.body:
                return Held.SOMETHING
            return min(held, self._after_all(outer.body, held))  # it may have run before
        if isinstance(outer, _WITH) and self.name in _bound_by(outer):
            return Held.SOMETHING
        if isinstance(outer, _TRY) and block is not outer.body:
            after = self._after_all(outer.body, held)
            # Behind the whole body comes only what stands under its else.
            return after if block is outer.orelse else min(held, after)
        return held

    def _after_all(self, block: Sequence[ast.stmt], held: Held) -> Held:
        for statement in block:
            held = self._after(statement, held)
        return held

    def _after(self, statement: ast.stmt, held: Held) -> Held:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            value = statement.value
            if value is None or self.name not in _bound_by(statement):
                return held
            return Held.NOTHING if self.is_nothing(value) else Held.SOMETHING
        if isinstance(statement, ast.If):
            return self._either([statement.body, statement.orelse], held)
        if isinstance(statement, _LOOP):
            if held and any(self._fills(inner) for inner in statement.body):
                return Held.SOMETHING
            return min(held, self._after_all(statement.body, held))
        if isinstance(statement, _WITH):
            held = Held.SOMETHING if self.name in _bound_by(statement) else held
            after = self._after_all(statement.body, held)
            return after if _lets_errors_pass(statement) else min(held, after)
        if isinstance(statement, _TRY):
            whole = self._after_all([*statement.body, *statement.orelse], held)
            handlers = [handler.body for handler in statement.handlers]
            failed = self._either(handlers, min(held, whole))
            return self._after_all(statement.finalbody, min(whole, failed))
        if isinstance(statement, ast.Match):
            return min(held, self._either([case.body for case in statement.cases], held))
        return Held.SOMETHING if self._fills(statement) else held

    def _either(self, branches: Sequence[list[ast.stmt]], held: Held) -> Held:
        """After one of several blocks; those that end elsewhere are of no account."""
        ends = (self._after_all(each, held) for each in branches if not _leaves(each))
        return min(ends, default=Held.SOMETHING)

    def _fills(self, statement: ast.stmt) -> bool:
        """Whether a statement puts something into the list that the variable is."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        return (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("append", "extend")
            and isinstance(call.func.value, ast.Name)
            and call.func.value.id == self.name
        )


def is_ruled_out(name: str, around: Sequence[ast.stmt], function: ast.AST) -> bool:
    """Whether a variable of a function holds nothing for certain when an expression is evaluated:
    where it holds something, a branch around has another block, or one before has left.

    :class:`Holding` can't tell: for it, what may hold nothing and what does are the same.

    Args:
        name: of the variable.
        around: the statements around the expression, from the outside in.
        function: the function's node.
    """
    nothing, outer = False, function
    for each in around:
        block = next((b for b in blocks(outer) if any(each is other for other in b)), None)
        if block is None:
            return False
        if nothing and _may_bind(outer, name):
            nothing = False  # elsewhere in it: in an earlier turn of a loop, say
        if isinstance(outer, ast.If):
            where = _where_nothing(outer.test, name)
            nothing = nothing or (where is not None and block is (outer.orelse, outer.body)[where])
        for statement in block[: _position(block, each)]:
            nothing = _is_nothing_after(statement, name, nothing)
        outer = each
    if not nothing or _may_bind(_bound_last(outer), name):
        return False
    # A function in it may give it something whenever it is called.
    return not any(isinstance(each, ast.Nonlocal) and name in each.names for each in walk(function))


def _bound_last(statement: ast.AST) -> ast.AST:
    """The part of a statement in which something is bound before all of it is evaluated."""
    if isinstance(statement, ast.Assign) and all(
        isinstance(e, ast.Name) for e in statement.targets
    ):
        return statement.value
    return statement


def _is_nothing_after(statement: ast.stmt, name: str, before: bool) -> bool:
    if isinstance(statement, ast.If):
        where = _where_nothing(statement.test, name)
        if where is not None:
            nothing, something = (statement.orelse, statement.body)[:: -1 if where else 1]
            if _leaves(something) and not any(_may_bind(each, name) for each in nothing):
                return True
    return before and not _may_bind(statement, name)


def _where_nothing(test: ast.expr, name: str) -> bool | None:
    """The outcome of a test that only a variable has that holds nothing; None where there is no
    such one, or the test may give it something.
    """
    if not isinstance(test, ast.Name | ast.Compare) and _may_bind(test, name):
        return None
    if isinstance(test, ast.Name) and test.id == name:
        return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _where_nothing(test.operand, name)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):  # all parts have the outcome, if they have this one
        outcome = isinstance(test.op, ast.And)
        return outcome if outcome in (_where_nothing(e, name) for e in test.values) else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        to = test.comparators[0]
        same = isinstance(test.left, ast.Name) and test.left.id == name
        is_none = isinstance(to, ast.Constant) and to.value is None
        if same and is_none and isinstance(test.ops[0], ast.Is | ast.IsNot):
            return isinstance(test.ops[0], ast.Is)
    return None


def _may_bind(node: ast.AST, name: str) -> bool:
    """Whether something in a node may bind a name, or say that it is one of elsewhere."""
    for each in walk(node):
        if isinstance(each, ast.Name):
            if each.id == name and not isinstance(each.ctx, ast.Load):
                return True
        elif isinstance(each, ast.Global | ast.Nonlocal):
            if name in each.names:
                return True
        elif name in (getattr(each, key, None) for key in ("name", "asname", "rest")):
            return True
    return False


def _leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether what stands behind the statement around a block is not reached from it."""
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _lets_errors_pass(statement: ast.With | ast.AsyncWith) -> bool:
    """Whether what stands behind is reached only when the whole body has run."""
    called = (each.context_expr for each in statement.items)
    return all(isinstance(e, ast.Call) and last_name(e.func) in _NO_SUPPRESSORS for e in called)


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


def parts(chains: Sequence[Sequence[ast.stmt]], function: ast.AST) -> list[list[int]]:
    """Several expressions in parts, by index, for which something may be looked up that can't be
    for all: what is in the first statement with one of them, block by block, and the rest.

    Args:
        chains: the statements around each expression, from the outside in.
        function: the function's node.
    """
    found = common_block(chains, function) if all(chains) else None
    if found is None:
        return []
    block, position = found
    first = block[position]
    inside = [i for i, chain in enumerate(chains) if first in chain]
    if len(inside) < len(chains):
        return [inside, [i for i in range(len(chains)) if i not in inside]]
    split: dict[int, list[int]] = {}
    for i, chain in enumerate(chains):
        inner = chain[chain.index(first) + 1 :][:1]
        for each in blocks(first):
            if inner and any(inner[0] is other for other in each):
                split.setdefault(id(each), []).append(i)
    return list(split.values())
