"""Functions, methods and constructors: their parameters, their object, the bases that they call."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeGuard, TypeVar

from megapg.migrate.python.flow import LOOP
from megapg.migrate.python.scopes import (
    Defined,
    FunctionNode,
    Scope,
    children_of,
    last_name,
    walk,
)

# What gives the variables around a call, where it is passed nothing; and the frame that has them.
_ALL_VARIABLES = frozenset({"locals", "vars", "dir"})
_FRAMES = frozenset({"currentframe", "_getframe"})

Of = TypeVar("Of")
P = ParamSpec("P")
R = TypeVar("R")


def kept(method: Callable[Concatenate[Of, P], R]) -> Callable[Concatenate[Of, P], R]:
    """Keep each answer of a method, or of a function about an object, on that object, by its other
    arguments, which are passed by place.
    """
    name = f"_kept_by_{method.__name__}"

    @functools.wraps(method)
    def answer(of: Of, /, *arguments: P.args, **named: P.kwargs) -> R:
        known: dict[object, R] = of.__dict__.setdefault(name, {})
        try:
            return known[arguments]
        except KeyError:  # most are asked again, and what is asked takes its time to be hashed
            pass
        found = known[arguments] = method(of, *arguments, **named)
        return found

    return answer


def parameters(function: ast.AST) -> list[ast.arg]:
    """The parameters of a function or lambda, ``*args`` and ``**kwargs`` apart; none of others."""
    given = getattr(function, "args", None)
    if not isinstance(given, ast.arguments):
        return []
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def first_parameter(function: ast.AST) -> str:
    """The name of the first positional parameter; empty where there is none."""
    given = getattr(function, "args", None)
    positional = [*given.posonlyargs, *given.args] if isinstance(given, ast.arguments) else []
    return positional[0].arg if positional else ""


def passed(function: Scope, call: ast.Call) -> dict[str, ast.expr]:
    """What a call passes for the parameters of a function, as far as that shows."""
    named = {each.arg: each.value for each in call.keywords if each.arg}
    if any(isinstance(each, ast.Starred) for each in call.args):
        return named
    names = [each.arg for each in parameters(function.node)][1 if self_of(function) else 0 :]
    return {**dict(zip(names, call.args, strict=False)), **named}


def left_out(function: Scope, call: ast.Call) -> frozenset[str]:
    """The parameters that a call of a function does not pass, as far as it shows what it passes."""
    shows = not any(isinstance(each, ast.Starred) for each in call.args)
    shows = shows and all(each.arg is not None for each in call.keywords)
    if not shows or last_name(call.func) == "partial":
        return frozenset()
    names = frozenset(each.arg for each in parameters(function.node))
    return names.difference(passed(function, call))


def decorators(node: ast.AST) -> set[str]:
    """The last names of a function's or class's decorators, called or not."""
    given = getattr(node, "decorator_list", ())
    return {last_name(each.func if isinstance(each, ast.Call) else each) for each in given}


def class_of(function: Scope | None) -> Scope | None:
    """The class whose constructor a function is."""
    outer = function.parent if function is not None and function.name == "__init__" else None
    return outer if outer is not None and outer.kind == "class" else None


def is_class_method(function: Scope) -> bool:
    """Whether the first parameter of a method is the class."""
    return "classmethod" in map(last_name, getattr(function.node, "decorator_list", ()))


@kept
def making(klass: ast.AST) -> set[str]:
    """The methods without an object by which the constructor of a class makes one, be it by way of
    others.
    """

    def called(method: ast.AST) -> set[str]:
        return {last_name(node.func) for node in walk(method) if isinstance(node, ast.Call)}

    return _called_by_the_constructor(klass, called, _without_an_object(klass))


@kept
def setting_up(klass: ast.AST) -> set[str]:
    """The methods that the constructor of a class calls of its object, be it by way of others."""

    def called(method: ast.AST) -> set[str]:
        own = first_parameter(method)
        return {
            node.func.attr
            for node in walk(method)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == own != ""
        }

    found = _called_by_the_constructor(klass, called, {*_methods(klass)})
    return found - _without_an_object(klass)


def _called_by_the_constructor(
    klass: ast.AST, called: Callable[[ast.AST], set[str]], among: set[str]
) -> set[str]:
    methods = _methods(klass)
    waiting = [name for name in methods if name == "__init__"]
    for each in waiting:  # grows
        waiting += sorted((called(methods[each]) & among) - {*waiting})
    return {*waiting[1:]}


def _methods(klass: ast.AST) -> dict[str, FunctionNode]:
    return {
        each.name: each for each in getattr(klass, "body", ()) if isinstance(each, FunctionNode)
    }


def _without_an_object(klass: ast.AST) -> set[str]:
    of_none = {"classmethod", "staticmethod"}
    return {name for name, each in _methods(klass).items() if decorators(each) & of_none}


def self_of(method: Scope | None) -> str:
    """What a method calls its instance; empty where there is none."""
    return next(iter(method.instances), "") if method is not None else ""


def is_self(value: ast.expr, method: Scope) -> bool:
    """Whether an expression is the name of a method's instance."""
    return isinstance(value, ast.Name) and value.id in method.instances


@kept
def attributes_kept(constructor: ast.AST) -> dict[str, set[int]]:
    """The attributes that a constructor gives its object, and the nodes of which the value of each
    comes, be it by a variable.
    """
    own, found = first_parameter(constructor), dict[str, set[int]]()
    of_variables: dict[str, set[int]] = {}
    assigned = (each for each in walk(constructor) if isinstance(each, ast.Assign | ast.AnnAssign))
    for each in sorted(assigned, key=lambda each: each.lineno):
        if each.value is None:
            continue
        nodes = {id(node): node for node in walk(each.value)}
        names = {node.id for node in nodes.values() if isinstance(node, ast.Name)}
        comes_of = set(nodes).union(*(of_variables.get(name, ()) for name in names))
        for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
            if isinstance(target, ast.Name):
                of_variables.setdefault(target.id, set()).update(comes_of)
            elif isinstance(target, ast.Attribute) and last_name(target.value) == own != "":
                found.setdefault(target.attr, set()).update(comes_of)
    return found


@kept
def attributes_read(method: ast.AST) -> set[str]:
    """The attributes that a method reads of its object."""
    own = first_parameter(method)
    return {
        each.attr
        for each in walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Load)
        and isinstance(each.value, ast.Name)
        and each.value.id == own != ""
    }


def is_super(node: ast.expr, method: Scope | None) -> bool:
    """Whether an expression is ``super()`` in a method, or ``super(C, self)`` in one of ``C``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id != "super" or len(node.args) != 2 or method is None:
        return node.func.id == "super" and not node.args
    klass, instance = node.args
    found = method.find(klass.id) if isinstance(klass, ast.Name) else None
    bound = found[1] if found else []
    around = [each.scope if isinstance(each, Defined) else None for each in bound]
    return around == [method.parent] and is_self(instance, method)


def of_its_class(method: ast.AST) -> Iterator[ast.AST]:
    """Every node in a method, but those of classes, and of functions with a self of their own, in
    it: what these call is not of the method's object.
    """
    own = first_parameter(method)
    waiting = [method]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [
            inner
            for inner in ast.iter_child_nodes(each)
            if not isinstance(inner, ast.ClassDef) and not own == first_parameter(inner) != ""
        ]


@kept
def calls_of_bases(constructor: ast.AST) -> list[ast.Call]:
    """The calls in a constructor that may be of the constructors of its bases."""
    own = first_parameter(constructor)
    return [
        each
        for each in of_its_class(constructor)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr == "__init__"
        and (
            (isinstance(each.func.value, ast.Call) and last_name(each.func.value.func) == "super")
            or (each.args and isinstance(each.args[0], ast.Name) and each.args[0].id == own != "")
        )
    ]


def kept_behind(constructor: Scope) -> list[ast.stmt] | None:
    """The statements that call constructors of bases; None where one is called in another way."""
    calls = calls_of_bases(constructor.node)
    found = [
        each
        for each in constructor.nodes
        if isinstance(each, ast.Expr) and any(each.value is call for call in calls)
    ]
    return sorted(found, key=lambda each: each.lineno) if len(found) == len(calls) else None


def set_up_behind(constructor: Scope) -> list[ast.stmt] | None:
    """The statement of a constructor's body behind which those of bases have run, in whatever
    branch; None where one is called in another way.
    """
    calls, node = kept_behind(constructor), constructor.node
    if calls is None or not isinstance(node, ast.FunctionDef):
        return None
    return [each for each in body_of(node) if any(e in calls for e in walk(each))][-1:]


def mentions(function: Scope, name: str) -> bool:
    """Whether a name means something in a function already, or locals() are taken as a whole."""
    for each in function.nodes:
        if isinstance(each, ast.Name) and each.id in (name, "locals", "vars"):
            return True
        if (isinstance(each, ast.arg) and each.arg == name) or _shows_variables(each):
            return True
    return False


@kept
def shown_until(function: Scope) -> int:
    """The last line from which something sees all variables that a function, or a module, has by
    then; of a loop that does so the last one. 0 where nothing does.
    """
    last, waiting = 0, [(function.node, 0)]
    while waiting:
        outer, end_of_loop = waiting.pop()
        for each in children_of(outer):
            if isinstance(each, FunctionNode | ast.Lambda | ast.ClassDef):
                continue  # it has variables of its own
            end = getattr(each, "end_lineno", None) or 0
            if _shows_variables(each):
                last = max(last, end_of_loop or end)
            waiting.append((each, end_of_loop or (end if isinstance(each, LOOP) else 0)))
    return last


def _shows_variables(node: ast.AST) -> bool:
    """Whether it is a call that gives the variables around it: ``locals()``, or the frame."""
    if not isinstance(node, ast.Call):
        return False
    is_bare = isinstance(node.func, ast.Name) and not (node.args or node.keywords)
    return last_name(node.func) in _FRAMES or (is_bare and last_name(node.func) in _ALL_VARIABLES)


def is_docstring(statement: ast.stmt) -> TypeGuard[ast.Expr]:
    """Whether a statement is a string, as the first one of a body that is its docstring."""
    match statement:
        case ast.Expr(ast.Constant(str())):
            return True
    return False


def docstrings_of(tree: ast.Module) -> Iterator[ast.expr]:
    """The docstrings of a module and of what is in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
            yield from (each.value for each in node.body[:1] if is_docstring(each))


def body_of(function: FunctionNode) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    return function.body[1:] if is_docstring(function.body[0]) else function.body


def first_line(statement: ast.stmt) -> int:
    """The line in which a statement begins, with its decorators."""
    decorated: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorated)])
