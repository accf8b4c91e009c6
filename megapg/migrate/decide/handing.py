"""Calls that pass a function what it takes as it is: a collection, or the one group that it needs.
Else it asks the globals, and its caller what it has.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from megapg.layout import FIELDS
from megapg.migrate.decide.anyhow import stands_in_for
from megapg.migrate.decide.decisions import Base, Decision, Passing, Plan
from megapg.migrate.decide.facts import Facts
from megapg.migrate.decide.functions import PARAMETER, Functions, only_reads_fields
from megapg.migrate.decide.references import Reference
from megapg.migrate.decide.threads import Threads
from megapg.migrate.find.index import Index
from megapg.migrate.migration import How
from megapg.migrate.python.methods import kept, left_out
from megapg.migrate.python.scopes import Opaque, Scope, Use
from megapg.upstream.mapping import GROUP_PARAMETERS


def handed_on(plan: Plan, facts: Facts, threads: Threads, index: Index) -> Iterator[Passing]:
    """The calls that are to pass it, by functions that ask a collection, or a model, about whatever
    groups: a function asks one thing.

    Args:
        plan: with all other decisions.
        facts: of the index.
        threads: of the same index.
        index: the project.
    """
    by_unit: dict[Scope, list[Decision]] = defaultdict(list)
    for each in plan.decisions:
        if each.located.use.scope.unit is not None:
            by_unit[each.located.use.scope.unit].append(each)
    taking = {each.function for each in plan.taking}
    passed = {id(each.reference.call) for each in plan.passing}
    for unit, decisions in list(by_unit.items()):
        path, asking = decisions[0].located.path, [e for e in decisions if _is_at_hand(e.base)]
        if not asking or facts.is_of_globals(unit, path):
            continue
        for use, call, called in _calls_of_one(facts, unit, path, index):
            function = _constructor(called)
            if function not in by_unit or id(call) in passed:
                continue
            base = facts.best(index.carriers(use, path), use, path) or asking[0].base
            found = _wanted(function, call, by_unit[function], taking, base)
            if (
                found is None
                or base.made_here
                or facts.renewals.outdate(base.expression, use, path)
            ):
                continue
            at = Reference(path, use, call, call.func)
            if threads.may_pass(at):
                yield Passing(at, path, base, found[1], found[0])


@kept
def _calls_of_one(
    facts: Facts, unit: Scope, path: Path, index: Index
) -> Sequence[tuple[Use, ast.Call, Scope]]:
    """The calls of a function by which one function, or class, is called, and that."""
    found = []
    for use, call in facts.calls_in(path).get(unit, ()):
        things = index.resolver.expression(use.node, use.scope, path)
        called = next(iter(things)).scope if len(things) == 1 else None
        if called is not None:
            found.append((use, call, called))
    return found


def handed_to(facts: Facts, threads: Threads, functions: Functions) -> set[Scope]:
    """The functions that are to ask what they are passed, as far as all who call them can pass
    something: they have a model at least.
    """
    return {
        function
        for function, (path, callers) in facts.fallen.handed.items()
        if threads.may_take(function, path)
        and threads.all_pass(function, functions.references.of(function, path), callers)
    }


def _is_at_hand(base: Base) -> bool:
    return base.expression != "None" and base.form in ("resolve", "groups_of")


def _constructor(called: Scope) -> Scope:
    """Of a class its own constructor."""
    made = called.defined("__init__") if called.kind == "class" else []
    return made[0] if len(made) == 1 else called


def _wanted(
    function: Scope,
    call: ast.Call,
    asked: Sequence[Decision],
    taking: Collection[Scope],
    base: Base,
) -> tuple[str, tuple[str, ...]] | None:
    """The parameter for a group that a call is to pass, empty for a collection, and the fields that
    are read of it; None where it is to pass neither.
    """
    if function in taking:
        return None
    lacking = left_out(function, call)
    of_it = [e for e in asked if e.base.expression == PARAMETER and e.base.form == "resolve"]
    if (
        PARAMETER in lacking
        and _may_be_none(PARAMETER, function)
        and of_it
        and not _minds_none(PARAMETER, function)
    ):
        fields = {need for each in of_it for need in each.answer.needs}
        read = _read_of(PARAMETER, function)
        known = only_reads_fields(function) and read <= {*FIELDS}
        if len(of_it) == len(asked) and (known or base.form == "resolve"):
            return "", tuple(sorted(fields | (read & {*FIELDS})))
    for name in lacking & GROUP_PARAMETERS.keys():
        fields = {each.answer.field for each in asked}
        is_all = all(
            each.base.how is How.RESOLVED
            and each.answer.asks == "group"
            and stands_in_for(each.located, function, name)
            for each in asked
        )
        if is_all and len(fields) == 1 and len(function.bindings[name]) > 1:
            return name, tuple(fields)
    return None


def _may_be_none(name: str, function: Scope) -> bool:
    first, *_ = function.bindings.get(name, (None,))
    default = first.default if isinstance(first, Opaque) and first.parameter else None
    return isinstance(default, ast.Constant) and default.value is None


def _read_of(name: str, function: Scope) -> set[str]:
    return {
        each.attr
        for each in function.nodes
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == name
    }


def _minds_none(name: str, function: Scope) -> bool:
    """Whether a function does more for want of a collection than take another one, or refuse."""
    branches = [e for e in function.nodes if isinstance(e, ast.If) and _names(e.test, name)]
    values = [e for e in function.nodes if isinstance(e, ast.IfExp) and _names(e.test, name)]
    return any(
        not isinstance(each, ast.Raise | ast.Pass) and not _binds(each, name)
        for branch in branches
        for each in (*branch.body, *branch.orelse)
    ) or any(not (_names(each.body, name) or _names(each.orelse, name)) for each in values)


def _binds(statement: ast.stmt, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(_names(target, name) for target in targets)


def _names(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))
