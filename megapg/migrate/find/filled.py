"""What a collection certainly has that a function makes, and fills: the other groups it lacks."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from megapg.layout import FIELDS
from megapg.migrate.find.meaning import Resolver, Thing
from megapg.migrate.python.flow import LOOP, blocks, statements_in
from megapg.migrate.python.scopes import (
    Alias,
    Binding,
    Opaque,
    Scope,
    is_named,
    last_name,
    walk,
)
from megapg.upstream.mapping import ROWS

# What Megatron-core calls the classes of collections. One has what it is made with.
CLASSES = frozenset(
    {"ProcessGroupCollection", "ModelCommProcessGroups", "GradCommProcessGroups"}
    | {"GradFinalizeProcessGroups"}
)
_WHOLE = "use_mpu_process_groups"  # what makes one of all groups of the globals
# Further than anybody hands on what another function makes.
_DEEPEST = 4

_Makers: TypeAlias = tuple[Scope, ...]
"""The functions that hand on what one makes, the outermost first."""


def is_filled(name: str, function: Scope) -> bool:
    """Whether a function puts groups into a collection: until then it lacks them."""
    return any(_is_put_into(name, each) for each in function.nodes)


def is_filled_before(name: str, around: Sequence[ast.stmt], function: Scope) -> bool:
    """Whether a collection that a function makes is complete when an expression is evaluated: the
    function has put all groups into it, and each is the globals' own group for its field.

    Args:
        name: of the variable.
        around: the statements around the expression, from the outside in.
        function: that has the variable.
    """
    outer: ast.AST = function.node
    puts = sum(_is_put_into(name, each) for each in function.nodes)
    for each in around:
        for block in blocks(outer):
            if each in block:
                before = chain.from_iterable(map(walk, block[: block.index(each)]))
                puts -= sum(_is_put_into(name, node) for node in before)
        if isinstance(each, LOOP):
            break  # an earlier turn may have bound it anew
        outer = each
    return puts == 0 and _is_of_the_globals(name, function)


def _is_of_the_globals(name: str, function: Scope) -> bool:
    """Whether the one collection that a function makes has the globals' own groups, but for what it
    puts into one that has them all.
    """
    made = [each.value for each in function.bindings[name] if isinstance(each, Alias)]
    others = (each for each in function.bindings[name] if not isinstance(each, Alias))
    if len(made) != 1 or not all(isinstance(e, Opaque) and e.parameter for e in others):
        return False
    value, put = made[0], _put_into(name, function)
    if not isinstance(value, ast.Call) or value.args or value.keywords:
        return False
    if len(put) != sum(_is_put_into(name, each) for each in function.nodes):
        return False
    return last_name(value.func) == _WHOLE or (
        last_name(value.func) in CLASSES
        and all(_field_got(given, name, function) == field for field, given in put)
    )


def _put_into(name: str, function: Scope) -> list[tuple[str, ast.expr]]:
    """What a function puts into a collection, a statement for each: the field, and the group."""
    return [
        (target.attr, each.value)
        for each in function.nodes
        if isinstance(each, ast.Assign)
        for target in each.targets[:1]
        if isinstance(target, ast.Attribute) and _is_put_into(name, target)
    ]


def _field_got(value: ast.expr, name: str, function: Scope) -> str:
    """The field that a group belongs to: one that a getter of the globals gives, or one read from
    the collection itself, be it held by a variable. Empty where the group is neither.
    """
    if isinstance(value, ast.Name):
        bound = function.bindings.get(value.id, ())
        values = [each.value for each in bound if isinstance(each, Alias)]
        if len(values) < len(bound) or any(isinstance(each, ast.Name) for each in values):
            return ""
        got = {_field_got(each, name, function) for each in values}
        return got.pop() if len(got) == 1 else ""
    if isinstance(value, ast.Attribute):
        return value.attr if is_named(value.value, name) else ""
    if not isinstance(value, ast.Call) or value.args:
        return ""
    of = last_name(value.func).removeprefix("get_").removesuffix("_group")
    true = {e.arg for e in value.keywords if ast.unparse(e.value) == "True"}
    return next((row.field for row in ROWS.get(of, ()) if {*row.true} <= true), "")


def _is_put_into(name: str, node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and not isinstance(node.ctx, ast.Load)
        and is_named(node.value, name)
    )


def fields_of(name: str, scope: Scope, path: Path, resolver: Resolver) -> frozenset[str] | None:
    """The fields that what a variable of a function, or module, holds certainly has, filled where
    the function does so; None where nobody can tell: what has none, and is handed on, is filled
    there.
    """
    if scope.kind == "function" and is_filled(name, scope):
        made = (each.value for each in scope.bindings[name] if isinstance(each, Alias))
        if any(isinstance(each, ast.Call) and last_name(each.func) == _WHOLE for each in made):
            return frozenset(FIELDS) - {field for field, _ in _put_into(name, scope)}
        return fields_handed_on(ast.Name(name), scope, path, resolver)
    found = _held(scope.bindings.get(name, ()), path, resolver, ())
    return None if found == frozenset() and _is_handed_on(name, scope) else found


def fields_handed_on(
    value: ast.expr, scope: Scope, path: Path, resolver: Resolver
) -> frozenset[str] | None:
    """The fields that what is handed on certainly has, of a variable with those that are filled in
    right behind where it is made; None where nobody can tell.
    """
    if not isinstance(value, ast.Name):
        return _fields(value, scope, path, resolver, ())
    found, name = [], value.id
    for each in scope.bindings.get(name, ()):
        made = _held([each], path, resolver, ())
        if made is not None and isinstance(each, Alias):
            found.append((made | _filled_in(_behind(each.value, scope.node), name)) or None)
    return least(found)


def _held(
    bindings: Iterable[Binding], path: Path, resolver: Resolver, makers: _Makers
) -> frozenset[str] | None:
    values = [each for each in bindings if isinstance(each, Alias)]
    return least(_fields(each.value, each.scope, path, resolver, makers) for each in values)


def least(found: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    """What all of some collections have that can be told about."""
    known = [each for each in found if each is not None]
    return frozenset.intersection(*known) if known else None


def _fields(
    value: ast.expr, scope: Scope, path: Path, resolver: Resolver, makers: _Makers
) -> frozenset[str] | None:
    if isinstance(value, ast.BoolOp | ast.IfExp):
        either = value.values if isinstance(value, ast.BoolOp) else [value.body, value.orelse]
        return least(_fields(each, scope, path, resolver, makers) for each in either)
    if not isinstance(value, ast.Call):
        return None
    if last_name(value.func) == _WHOLE and (value.args or value.keywords):
        listed = [*value.args, *(each.value for each in value.keywords)][0]
        known = isinstance(listed, ast.List) and all(
            isinstance(e, ast.Constant) for e in listed.elts
        )
        return frozenset(map(str, ast.literal_eval(listed))) if known else None
    called = resolver.expression(value.func, scope, path)
    if called and all(map(_is_a_collection, called)):
        names = {each.arg for each in value.keywords}
        shows = not value.args and None not in names
        return frozenset(each for each in names if each) if shows else None
    return least(_filled_by(each, resolver, makers) for each in called)


def _is_a_collection(thing: Thing) -> bool:
    if thing.kind == "class" and thing.scope is not None:
        return thing.scope.name in CLASSES
    return thing.kind == "name" and thing.name.rpartition(".")[2] in CLASSES


def _filled_by(thing: Thing, resolver: Resolver, makers: _Makers) -> frozenset[str] | None:
    """The fields that what a function returns certainly has."""
    function, path = thing.scope, thing.path
    if thing.kind != "function" or function is None or path is None:
        return None
    if function in makers or len(makers) > _DEEPEST:
        return None
    makers = (*makers, function)
    found = []
    for each in statements_in(function.node):
        if isinstance(each, ast.Return) and each.value is not None:
            if isinstance(each.value, ast.Name):
                found.append(_filled_until(each, each.value.id, function, path, resolver, makers))
            else:
                found.append(_fields(each.value, function, path, resolver, makers))
    return least(found)


def _filled_until(
    end: ast.Return, name: str, function: Scope, path: Path, resolver: Resolver, makers: _Makers
) -> frozenset[str] | None:
    """The fields of a variable that a function returns, which nothing else may fill."""
    bindings = function.bindings.get(name, ())
    made = _held(bindings, path, resolver, makers) if len(bindings) == 1 else None
    if made is None or _is_handed_on(name, function):
        return None
    return made | _filled_in(_before(end, function.node), name)


def _filled_in(statements: Iterable[ast.stmt], name: str) -> frozenset[str]:
    """The fields that some statements fill of what a variable holds."""
    return frozenset(
        target.attr
        for each in statements
        if isinstance(each, ast.Assign)
        for target in each.targets
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == name
    )


def _is_handed_on(name: str, function: Scope) -> bool:
    """Whether a function does anything with a variable but fill, read and return it."""
    called = {id(each.func) for each in function.nodes if isinstance(each, ast.Call)}
    harmless = {
        id(each.value)
        for each in function.nodes
        if isinstance(each, ast.Return)
        or (isinstance(each, ast.Attribute) and id(each) not in called)
    }
    return any(
        isinstance(each, ast.Name)
        and each.id == name
        and isinstance(each.ctx, ast.Load)
        and id(each) not in harmless
        for each in function.nodes
    )


def _behind(value: ast.expr, outer: ast.AST) -> list[ast.stmt]:
    """The statements of its block behind the one that gives a variable a value."""
    for each in (outer, *statements_in(outer)):
        for block in blocks(each):
            for at, one in enumerate(block):
                if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is value:
                    return block[at + 1 :]
    return []


def _before(statement: ast.stmt, outer: ast.AST) -> list[ast.stmt]:
    """The statements that have run when one is come to, without those in their blocks."""
    waiting: list[tuple[ast.AST, list[ast.stmt]]] = [(outer, [])]
    while waiting:
        node, ran = waiting.pop()
        for block in blocks(node):
            for at, each in enumerate(block):
                if each is statement:
                    return [*ran, *block[:at]]
                if any(blocks(each)):
                    waiting.append((each, [*ran, *block[:at]]))
    return []
