"""Autograd functions that can be given one argument more: ``forward`` takes it, keeps it on the
context where ``backward`` asks, and ``backward`` returns one gradient more, which is None.

torch drops such a None where a function is applied without that argument, so the callers that have
nothing to pass stay as they are. Whoever calls ``forward`` or ``backward`` by hand would notice:
:meth:`megapg.migrate.decide.functions.Functions.in_the_way` asks for that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry
from megapg.migrate.python.insert import add_statement
from megapg.migrate.python.methods import (
    body_of,
    decorators,
    first_parameter,
    kept,
    mentions,
    parameters,
)
from megapg.migrate.python.scopes import Alias, FunctionNode, Opaque, Scope
from megapg.migrate.python.source import Source
from megapg.upstream.mapping import COLLECTION_NAMES

_METHODS = frozenset({"forward", "backward"})
# With these torch hands the arguments on in another way, or to something else that counts them.
_OTHER_WAYS = frozenset(
    {"symbolic", "setup_context", "vmap", "jvp", "vjp", "apply", "generate_vmap_rule"}
)
# What torch offers to decorate the methods with: each hands on all that it is passed, and returned.
_HANDING_ON = frozenset({"staticmethod", "custom_fwd", "custom_bwd", "once_differentiable"})
_COUNTED = "needs_input_grad"  # as long as there are arguments
_END_OF_TUPLE = re.compile(r"[\s,]*\)?")
_OF_TUPLES = frozenset({"count", "index"})


@dataclass(frozen=True)
class Applied:
    """An autograd function that can be given one argument more."""

    forward: Scope
    backward: Scope | None
    gradients: tuple[int, ...]  # where in the text one more is to be returned


class Autograd:
    """Answers which autograd functions of an index can be given one argument more."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def of(self, method: Scope | None, path: Path) -> Applied | None:
        """The autograd function of which a function is a method; None where there is none, or it
        can't be given an argument.
        """
        klass = method.parent if method is not None and method.name in _METHODS else None
        return self._find(klass, path) if klass is not None and klass.kind == "class" else None

    @kept
    def _find(self, klass: Scope, path: Path) -> Applied | None:
        node, looked = klass.node, self._index.look(path)
        above = list(ancestry(klass, path, self._index.resolver))[1:]
        is_plain = isinstance(node, ast.ClassDef) and not (node.decorator_list or node.keywords)
        if len(above) != 1 or not str(above[0]).endswith("autograd.Function") or not is_plain:
            return None
        if _OTHER_WAYS & klass.bindings.keys() or _mentions_a_count(node) or looked is None:
            return None
        forward, backward = (_only(klass, name) for name in ("forward", "backward"))
        if forward is None or (backward is None and "backward" in klass.bindings):
            return None
        body = body_of(forward.node) if isinstance(forward.node, ast.FunctionDef) else []
        if not body or add_statement(looked[0], body[0], "") is None:
            return None  # there is no place where it is kept
        if backward is None:
            return Applied(forward, None, ())
        found = _gradients(looked[0], backward, count_of_arguments(forward))
        return None if found is None else Applied(forward, backward, tuple(found))


def count_of_arguments(forward: Scope) -> int:
    """How many arguments an autograd function is applied to: the context is none."""
    return len(_by_place(forward.node)) - 1


def kept_in(method: Scope, name: str) -> str:
    """What a method of an autograd function writes for something in the context."""
    return f"{first_parameter(method.node)}.{name}"


def _mentions_a_count(klass: ast.AST) -> bool:
    return any(isinstance(e, ast.Attribute) and e.attr == _COUNTED for e in ast.walk(klass))


def _only(klass: Scope, name: str) -> Scope | None:
    """The one static method of that name, where it takes what it is passed by place alone."""
    bound, methods = klass.bindings.get(name, ()), klass.defined(name)
    if len(bound) != 1 or len(methods) != 1:
        return None
    method, node = methods[0], methods[0].node
    if not isinstance(node, ast.FunctionDef) or not _is_plain(node):
        return None
    given = node.args
    # Whatever is behind the gradients that backward names is handed to it as before.
    has_rest = given.vararg is not None and name == "forward"
    if has_rest or given.kwarg or given.kwonlyargs or not count_of_arguments(method):
        return None
    is_bound_anew = len(method.bindings.get(first_parameter(node), ())) != 1
    if is_bound_anew or any(mentions(method, each) for each in COLLECTION_NAMES):
        return None
    return method


def _is_plain(method: ast.FunctionDef) -> bool:
    """Whether a method is static, and nothing else is made of it than torch does."""
    return "staticmethod" in decorators(method) <= _HANDING_ON


def _by_place(function: ast.AST) -> list[ast.arg]:
    given = getattr(function, "args", None)
    return [*given.posonlyargs, *given.args] if isinstance(given, ast.arguments) else []


def _gradients(source: Source, backward: Scope, count: int) -> list[int] | None:
    """Where one more is to be returned; None where it does not show how many are."""
    found: list[int] = []
    if not _always_returns(getattr(backward.node, "body", ())):
        return None
    for each in _returns(backward.node):
        value = each.value
        if isinstance(value, ast.Tuple):
            end = source.extent(value.elts[-1])[1] if value.elts else 0
            rest = source.text[end : source.extent(value)[1]]
            starred = any(isinstance(element, ast.Starred) for element in value.elts)
            if len(value.elts) != count or starred or not _END_OF_TUPLE.fullmatch(rest):
                return None
        elif value is None or count != 1 or not _is_one(value, backward):
            return None
        else:
            end = source.extent(value)[1]
        found.append(end)
    return found or None


def _is_one(value: ast.expr, backward: Scope) -> bool:
    """Whether what is returned is for certain no tuple: None, what was passed, or a variable that
    is bound once and of which something is read that no tuple has.
    """
    if not isinstance(value, ast.Name):
        return isinstance(value, ast.Constant) and value.value is None
    bound = backward.bindings.get(value.id, ())
    if len(bound) != 1 or not isinstance(bound[0], Alias | Opaque):
        return False
    if isinstance(bound[0], Opaque) and bound[0].parameter:
        return any(each.arg == value.id for each in parameters(backward.node))  # not all the rest
    return any(
        isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == value.id
        and each.attr not in _OF_TUPLES
        for each in backward.nodes
    )


def _always_returns(block: Sequence[ast.stmt]) -> bool:
    """Whether a block of statements does not go on at its end."""
    match block[-1:]:
        case [ast.Return() | ast.Raise()]:
            return True
        case [ast.If(_, body, orelse)]:
            return _always_returns(body) and _always_returns(orelse)
    return False


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """The statements by which a function itself returns."""
    waiting: list[ast.AST] = [*getattr(function, "body", ())]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Return):
            yield each
        elif not isinstance(each, FunctionNode | ast.ClassDef | ast.expr):
            waiting += ast.iter_child_nodes(each)
