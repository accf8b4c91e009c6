"""Autograd functions that can be given one argument more: ``forward`` takes it and puts it on the
context, ``backward`` reads it there, and returns one gradient more, which is None.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry
from megapg.migrate.python.insert import add_statement
from megapg.migrate.python.methods import body_of, decorators, first_parameter, kept, mentions
from megapg.migrate.python.scopes import Alias, Opaque, Scope, last_name
from megapg.migrate.python.source import Source

_DECORATORS = frozenset({"staticmethod", "custom_fwd", "custom_bwd", "once_differentiable"})
_METHODS = frozenset({"forward", "backward", "symbolic"})
# With these, torch hands the arguments on in another way.
_OTHER_WAYS = frozenset({"setup_context", "vmap", "jvp", "vjp", "apply", "generate_vmap_rule"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_END_OF_TUPLE = re.compile(r"[\s,]*\)?")
# Further than anyone looks for what a variable holds.
_DEEPEST = 5


@dataclass(frozen=True)
class Applied:
    """An autograd function that can be given one argument more."""

    forward: Scope
    backward: Scope
    symbolic: Scope | None  # for ONNX, which is given the same arguments
    gradients: tuple[int, ...]  # where in the text one more is to be returned


class Autograd:
    """Answers which autograd functions of an index can be given one argument more."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def of(self, method: Scope | None, path: Path) -> Applied | None:
        """The autograd function of which a function is a method; None where there is none, or it
        can't be given an argument.
        """
        klass = method.parent if method is not None else None
        if klass is None or klass.kind != "class" or method is None:
            return None
        return self._find(klass, path) if method.name in _METHODS else None

    @kept
    def _find(self, klass: Scope, path: Path) -> Applied | None:
        above = list(ancestry(klass, path, self._index.resolver))[1:]
        made_of_torch = [isinstance(e, str) and e.endswith("autograd.Function") for e in above]
        if made_of_torch != [True] or _OTHER_WAYS & klass.bindings.keys():
            return None
        forward, backward = (_only(klass, name) for name in ("forward", "backward"))
        symbolic = _only(klass, "symbolic")
        looked = self._index.look(path)
        if forward is None or backward is None or looked is None:
            return None
        if "symbolic" in klass.bindings and symbolic is None:
            return None
        methods = [each for each in (forward, symbolic) if each is not None]
        if not all(map(_takes_by_place, methods)) or not _keeps(looked[0], forward):
            return None
        found = self._gradients(looked[0], backward, count_of_arguments(forward), path)
        return None if found is None else Applied(forward, backward, symbolic, tuple(found))

    def _gradients(
        self, source: Source, backward: Scope, count: int, path: Path
    ) -> list[int] | None:
        """Where one more is to be returned; None where it does not show how many are."""
        found = []
        for statement in _returns(backward.node):
            value = statement.value
            if isinstance(value, ast.Tuple):
                if len(value.elts) != count or any(isinstance(e, ast.Starred) for e in value.elts):
                    return None
                end = source.extent(value.elts[-1])[1]
                rest = source.text[end : source.extent(value)[1]]
                if not _END_OF_TUPLE.fullmatch(rest):
                    return None
            elif value is None or count != 1 or not self._is_one(value, backward, path):
                return None
            else:
                end = source.extent(value)[1]
            found.append(end)
        return found or None

    def _is_one(self, value: ast.expr, scope: Scope, path: Path, depth: int = 0) -> bool:
        """Whether an expression is for certain no tuple."""
        if depth > _DEEPEST:
            return False
        match value:
            case ast.BinOp() | ast.UnaryOp() | ast.Constant():
                return True
            case ast.IfExp(_, body, orelse):
                return all(self._is_one(e, scope, path, depth + 1) for e in (body, orelse))
            case ast.Name(name):
                found = scope.find(name)
                return found is not None and all(
                    self._is_one(each.value, each.scope, path, depth + 1)
                    if isinstance(each, Alias)
                    else isinstance(each, Opaque)
                    and each.parameter
                    and name in _by_place(found[0].node)
                    for each in found[1]
                )
            case ast.Call(ast.Attribute(ast.Name(name), _)) if name == "torch":
                return last_name(value.func) not in _GIVING_TUPLES
            case ast.Call(ast.Attribute(owner, attribute)) if attribute in _OF_TENSORS:
                return self._is_one(owner, scope, path, depth + 1)
            case ast.Call():
                things = self._index.resolver.expression(value.func, scope, path)
                return bool(things) and all(
                    each.kind == "function"
                    and each.scope is not None
                    and each.path is not None
                    and self._gives_one(each.scope, each.path, depth + 1)
                    for each in things
                )
        return False

    def _gives_one(self, function: Scope, path: Path, depth: int) -> bool:
        if decorators(function.node) or not isinstance(function.node, ast.FunctionDef):
            return False
        values = [each.value for each in _returns(function.node)]
        return bool(values) and all(
            each is not None and self._is_one(each, function, path, depth) for each in values
        )


# Of torch, what gives several; and what a tensor's methods give one of.
_GIVING_TUPLES = frozenset(
    {"split", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "meshgrid", "max", "min"}
    | {"sort", "topk", "median", "mode", "unique", "where", "nonzero", "kthvalue", "frexp"}
)
_OF_TENSORS = frozenset(
    {"contiguous", "view", "reshape", "clone", "transpose", "permute", "squeeze", "unsqueeze"}
    | {"to", "type", "float", "half", "bfloat16", "mul", "mul_", "div", "div_", "add", "add_"}
    | {"expand", "view_as", "type_as", "sum", "flatten", "movedim", "masked_fill", "narrow"}
)


def count_of_arguments(forward: Scope) -> int:
    """How many arguments an autograd function is applied to: the context is none."""
    return len(_by_place(forward.node)) - 1


def context_of(method: Scope) -> str:
    """What a method of an autograd function calls the context."""
    return first_parameter(method.node)


def _only(klass: Scope, name: str) -> Scope | None:
    """The one static method of that name."""
    bound, methods = klass.bindings.get(name, ()), klass.defined(name)
    if len(bound) != 1 or len(methods) != 1 or not isinstance(methods[0].node, ast.FunctionDef):
        return None
    given = decorators(methods[0].node)
    return methods[0] if "staticmethod" in given and given <= _DECORATORS else None


def _by_place(function: ast.AST) -> list[str]:
    given = getattr(function, "args", None)
    if not isinstance(given, ast.arguments):
        return []
    return [each.arg for each in (*given.posonlyargs, *given.args)]


def _takes_by_place(method: Scope) -> bool:
    given = getattr(method.node, "args", None)
    return (
        isinstance(given, ast.arguments)
        and not (given.vararg or given.kwarg or given.kwonlyargs)
        and len(_by_place(method.node)) > 1
        and not mentions(method, "pg_collection")
    )


def _keeps(source: Source, forward: Scope) -> bool:
    """Whether there is a place where it is put on the context."""
    body = body_of(forward.node) if isinstance(forward.node, _Function) else []
    return bool(body) and add_statement(source, body[0], "") is not None


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """The statements by which a function itself returns."""
    waiting = [*getattr(function, "body", ())]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Return):
            yield each
        elif not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            waiting += ast.iter_child_nodes(each)
