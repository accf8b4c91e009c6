"""What has certainly run before what, within one function: enough to move a read, or to trust a
variable.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from megapg.migrate.python.scopes import FunctionNode, Parents, Use, last_name, walk

_OWN_SCOPE = FunctionNode | ast.Lambda | ast.ClassDef
LOOP = ast.For | ast.AsyncFor | ast.While
_WITH = ast.With | ast.AsyncWith
TRY = ast.Try | ast.TryStar
# Contexts that end with the error of their body; others may swallow it.
_NO_SUPPRESSORS = frozenset(
    {"no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "device"}
    | {"nullcontext", "open", "init_empty_weights"}
)
_LEAVING = frozenset({ast.Return, ast.Raise, ast.Continue, ast.Break})
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements directly in a function or a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block:
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def statements_in(outer: ast.AST) -> Iterator[ast.stmt]:
    """The statements in a function or a statement, in any depth, but those of functions in it."""
    waiting = _directly_in(outer)
    while waiting:  # a chain of elif is deeper than Python recurses
        statement = waiting.pop()
        yield statement
        if not isinstance(statement, _OWN_SCOPE):
            waiting += _directly_in(statement)


def _directly_in(outer: ast.AST) -> list[ast.stmt]:
    """The statements of its blocks, the last one first."""
    return [statement for block in blocks(outer) for statement in block][::-1]


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
        block, at = _block_of(outer, each) or ([], 0)
        before = _position(block, statement)
        if before is not None and before < at:
            return not isinstance(statement, LOOP)
        if each is statement:  # a loop's or with's variable, in its body
            return isinstance(each, ast.For | ast.AsyncFor | _WITH)
        outer = each
    return False


def is_dead(around: Sequence[ast.stmt], function: ast.AST) -> bool:
    """Whether some statements, from the outside in, are never come to, behind one that leaves."""
    for outer, each in zip((function, *around), around, strict=False):
        block, at = _block_of(outer, each) or ([], 0)
        if any(before.__class__ in _LEAVING for before in block[:at]):  # a block may be long
            return True
    return False


def begins_before(statement: ast.stmt, around: Sequence[ast.stmt], function: ast.AST) -> bool:
    """Whether a statement of a function has begun whenever an expression is evaluated, be it a loop
    that has nothing to run for. Arguments are those of :func:`runs_before`.
    """
    outer: ast.AST = function
    for each in around:
        block, at = _block_of(outer, each) or ([], 0)
        before = _position(block, statement)
        if before is not None and before <= at:
            return True
        outer = each
    return False


def _position(block: Sequence[ast.stmt], statement: ast.stmt) -> int | None:
    """Where in a block a statement is; None where it is not. Blocks may be long, and are in the
    order of the source.
    """
    at = bisect_left(block, _place(statement), key=_place)
    return at if at < len(block) and block[at] is statement else None


def _place(statement: ast.stmt) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


def _block_of(outer: ast.AST, statement: ast.stmt) -> tuple[list[ast.stmt], int] | None:
    """The block of a compound statement, or of a function, that a statement is in, and where."""
    for block in blocks(outer):
        at = _position(block, statement)
        if at is not None:
            return block, at
    return None


def binding_statements(function: ast.AST, name: str) -> Iterator[ast.stmt]:
    """The statements of a function, nested ones included, that bind a name when they run."""
    return (each for each in statements_in(function) if name in bound_by(each))


def bound_by(statement: ast.stmt) -> set[str]:
    """The names that a statement binds where it runs, those of its blocks apart."""
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
            found = _block_of(outer, each)
            if found is None:
                return Held.UNBOUND
            block, position = found
            held = self._on_entering(outer, block, held)
            held = self._after_all(block[:position], held)
            outer = each
        return held

    def _on_entering(self, outer: ast.AST, block: list[ast.stmt], held: Held) -> Held:
        """What it holds at the beginning of one of the blocks of a statement."""
        if isinstance(outer, LOOP):
            if self.name in bound_by(outer) and block is outer.body:
                return Held.SOMETHING
            return min(held, self._after_all(outer.body, held))  # it may have run before
        if isinstance(outer, _WITH) and self.name in bound_by(outer):
            return Held.SOMETHING
        if isinstance(outer, TRY) and block is not outer.body:
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
            if value is None or self.name not in bound_by(statement):
                return held
            return Held.NOTHING if self.is_nothing(value) else Held.SOMETHING
        if isinstance(statement, ast.If):
            return self._either([statement.body, statement.orelse], held)
        if isinstance(statement, LOOP):
            if held and any(self._fills(inner) for inner in statement.body):
                return Held.SOMETHING
            return min(held, self._after_all(statement.body, held))
        if isinstance(statement, _WITH):
            held = Held.SOMETHING if self.name in bound_by(statement) else held
            after = self._after_all(statement.body, held)
            return after if _lets_errors_pass(statement) else min(held, after)
        if isinstance(statement, TRY):
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
        match statement:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "append" | "extend"))):
                return name == self.name
        return False


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
        found = _block_of(outer, each)
        if found is None:
            return False
        block, position = found
        if nothing and _may_bind(outer, name):
            nothing = False  # elsewhere in it: in an earlier turn of a loop, say
        if isinstance(outer, ast.If):
            where = _where_nothing(outer.test, name)
            nothing = nothing or (where is not None and block is (outer.orelse, outer.body)[where])
        for statement in block[:position]:
            nothing = _is_nothing_after(statement, name, nothing)
        outer = each
    if not nothing or _may_bind(_bound_last(outer), name):
        return False
    # A function in it may give it something whenever it is called.
    return not any(isinstance(each, ast.Nonlocal) and name in each.names for each in walk(function))


def begins_ruled_out(name: str, around: Sequence[ast.stmt], function: ast.AST) -> bool:
    """Whether a branch around an expression is one for where a variable of a function holds
    nothing, be it that the branch gives it something.

    Args: as for :func:`is_ruled_out`.
    """
    outer = function
    for each in around:
        found = _block_of(outer, each)
        if found is None:
            return False
        if isinstance(outer, ast.If):
            where = _where_nothing(outer.test, name)
            if where is not None and found[0] is (outer.orelse, outer.body)[where]:
                return True
        outer = each
    return False


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
    match test:
        case ast.Name(tested) if tested == name:
            return False
        case ast.UnaryOp(ast.Not(), operand):
            inner = _where_nothing(operand, name)
            return None if inner is None else not inner
        case ast.BoolOp(operator, parts):  # all have the outcome, if they have this one
            outcome = isinstance(operator, ast.And)
            return outcome if outcome in (_where_nothing(e, name) for e in parts) else None
        case ast.Compare(ast.Name(tested), [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
            return isinstance(test.ops[0], ast.Is) if tested == name else None
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
    return bool(block) and block[-1].__class__ in _LEAVING


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


@dataclass(frozen=True)
class Common:
    """The innermost block that has several expressions in it."""

    outer: ast.AST  # the function, or compound statement, of which it is a block
    depth: int  # how many statements are around it
    # Its statements with one of the expressions or more, in their order, each with the indices of
    # these.
    runs: tuple[tuple[ast.stmt, tuple[int, ...]], ...]


def common_block(
    chains: Mapping[int, Sequence[ast.stmt]], outer: ast.AST, depth: int = 0
) -> Common | None:
    """The innermost block that has several expressions in it; None where there is no such block.

    Args:
        chains: for each expression, by an index, the statements around it, from the outside in.
        outer: what has all of them: the function, or a compound statement in it.
        depth: how many statements of each chain are around the blocks of that one.
    """
    best = None
    while chains and all(len(chain) > depth for chain in chains.values()):
        found: dict[ast.stmt, list[int]] = {}
        for i, chain in chains.items():
            found.setdefault(chain[depth], []).append(i)
        here = sorted(found, key=_place)
        in_block = _block_of(outer, here[0])
        if in_block is None or any(_position(in_block[0], each) is None for each in here):
            break
        best = Common(outer, depth, tuple((each, tuple(found[each])) for each in here))
        if len(here) > 1:
            break
        outer, depth = here[0], depth + 1
    return best


def first_read(function: ast.AST, uses: Sequence[Use]) -> ast.stmt | None:
    """The statement before which something can be looked up that several uses need: one that has
    all others behind it, in its block, and certainly makes one of the uses itself. None where there
    is none, or nothing can be put before it.
    """
    chains = dict(enumerate(statements_around(use.parents, function) for use in uses))
    found = common_block(chains, function)
    if found is None:
        return None
    statement, inside = found.runs[0]
    own = [uses[i] for i in inside if len(chains[i]) == found.depth + 1]
    return statement if certainly_reads(statement, own) else None


def certainly_reads(statement: ast.stmt, uses: Iterable[Use]) -> bool:
    """Whether a statement, before which something can be put, certainly makes one of some uses in
    it. Those in its inner blocks it never makes for certain, and they may be left out.
    """
    if isinstance(statement, FunctionNode | ast.ClassDef):
        return False
    return any(is_certain(use.node, use.parents, statement) for use in uses)


def within(statement: ast.stmt, inner: ast.stmt) -> int:
    """In which of its blocks a statement has another one: that block's identity."""
    found = _block_of(statement, inner)
    return id(found[0]) if found is not None else 0


def is_repeated(node: ast.AST, parents: Parents) -> bool:
    """Whether an expression is evaluated again within its statement."""
    inner = node
    for outer in parents:
        if isinstance(outer, _Comprehension):
            return True
        if isinstance(outer, ast.stmt):
            return isinstance(outer, ast.While) and inner is outer.test
        inner = outer
    return False
