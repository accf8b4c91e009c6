"""The parameters for groups and collections that a call does not pass."""

from __future__ import annotations

import ast

from megapg.migrate.python.methods import kept, left_out, parameters, passed, self_of
from megapg.migrate.python.scopes import Alias, Scope, last_name, walk
from megapg.upstream.mapping import ANY_GROUP, COLLECTION_NAMES, GROUP_PARAMETERS

OF_GROUPS = frozenset({*COLLECTION_NAMES, *GROUP_PARAMETERS, *ANY_GROUP})
"""What parameters for groups and collections are called."""


def all_of_groups(function: Scope) -> frozenset[str]:
    """The parameters of a function which whoever calls a value does not pass: those for groups, and
    others that may be None.
    """
    return _may_lack(function)


@kept
def _may_lack(function: Scope) -> frozenset[str]:
    named = {each.arg for each in parameters(function.node)}
    return frozenset(named & OF_GROUPS | none_at_first(function))


@kept
def none_at_first(function: Scope) -> frozenset[str]:
    """The parameters of a function that are None where nothing is passed for them."""
    given = getattr(function.node, "args", None)
    if not isinstance(given, ast.arguments):
        return frozenset()
    by_place = [*given.posonlyargs, *given.args]
    at_the_end = by_place[len(by_place) - len(given.defaults) :]
    defaults = (*zip(at_the_end, given.defaults, strict=True),)
    named = (*zip(given.kwonlyargs, given.kw_defaults, strict=True),)
    return frozenset(each.arg for each, value in (*defaults, *named) if _is_none(value))


def not_passed(function: Scope, call: ast.Call, unit: Scope) -> frozenset[str]:
    """The parameters that a call does not pass: of collections also where it passes a dictionary
    that its function makes, and in which it names none.
    """
    dictionaries = [each.value for each in call.keywords if each.arg is None]
    if not dictionaries or not all(_is_made_in(each, unit) for each in dictionaries):
        return left_out(function, call) & _may_lack(function) | _passed_none(function, call)
    named = {each.arg for each in call.keywords}
    takes = {each.arg for each in parameters(function.node)} & {*COLLECTION_NAMES}
    return frozenset(takes - named - _keys_in(unit))


def named_in(call: ast.Call, unit: Scope | None) -> set[str]:
    """What a call passes by name: of a dictionary the collections that its function puts in it."""
    named = {each.arg for each in call.keywords if each.arg}
    if unit is None or len(named) == len(call.keywords):
        return named
    return named | {*COLLECTION_NAMES} & _keys_in(unit)


def _passed_none(function: Scope, call: ast.Call) -> frozenset[str]:
    """The parameters, but for collections, that a call fills with None."""
    none = {name for name, given in passed(function, call).items() if _is_none(given)}
    return frozenset(none - {*COLLECTION_NAMES})


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def not_applied_to(method: Scope, call: ast.Call) -> frozenset[str]:
    """The parameters that the method of an autograd function is not passed."""
    if any(isinstance(each, ast.Starred) for each in call.args):
        return frozenset()
    by_place = parameters(method.node)[1:]  # without the context
    left_out = _may_lack(method) & {each.arg for each in by_place[len(call.args) :]}
    none = (each.arg for each, given in zip(by_place, call.args, strict=False) if _is_none(given))
    return left_out.union({*none} - {*COLLECTION_NAMES}) if method.name == "forward" else left_out


def _passed(function: Scope, call: ast.Call) -> dict[str, ast.expr]:
    """What a call passes for the parameters of a function, be it one that is applied."""
    klass = function.parent
    is_method = klass is not None and klass.kind == "class" and not self_of(function)
    if not is_method or last_name(call.func) != "apply":
        return passed(function, call)
    if function.name != "forward" or any(isinstance(each, ast.Starred) for each in call.args):
        return {}  # backward has what its context keeps
    names = [each.arg for each in parameters(function.node)[1:]]
    return dict(zip(names, call.args, strict=False))


def handed(function: Scope, call: ast.Call, left_out: frozenset[str]) -> dict[str, str]:
    """The parameters of a function that a call fills with parameters of its own function, for
    groups, which that was not passed; and these.
    """
    unfilled = left_out & OF_GROUPS
    return {
        name: node.id
        for name, given in _passed(function, call).items()
        if name in OF_GROUPS and unfilled
        for node in (walk(given) if name in COLLECTION_NAMES else (given,))
        if isinstance(node, ast.Name) and node.id in unfilled
    }


def without_any(function: Scope, call: ast.Call, left_out: frozenset[str]) -> frozenset[str]:
    """The parameters of a function that a call fills with parameters of its own function which that
    was not passed.
    """
    given = _passed(function, call).items() if left_out else ()
    return frozenset(n for n, each in given if isinstance(each, ast.Name) and each.id in left_out)


def _is_made_in(dictionary: ast.expr, unit: Scope) -> bool:
    """Whether an expression is a variable of a function for a dictionary that it makes itself."""
    name = dictionary.id if isinstance(dictionary, ast.Name) else ""
    made = [each.value if isinstance(each, Alias) else None for each in unit.bindings.get(name, ())]
    return bool(made) and all(
        (isinstance(each, ast.Dict) and None not in each.keys)
        or (isinstance(each, ast.Call) and last_name(each.func) == "dict" and not each.args)
        for each in made
    )


def _keys_in(unit: Scope) -> set[str]:
    """All that may be a key of a dictionary in a function."""
    nodes = list(ast.walk(unit.node))
    strings = (each.value for each in nodes if isinstance(each, ast.Constant))
    calls = (each for each in nodes if isinstance(each, ast.Call))
    filling = (each for each in calls if last_name(each.func) in ("dict", "update"))
    names = (keyword.arg for each in filling for keyword in each.keywords)
    return {each for each in (*strings, *names) if isinstance(each, str)}
