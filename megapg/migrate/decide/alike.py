"""What has to be answered alike: one thing serves all that a function, or a class, asks about one
kind of group. Where nothing can, the globals do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megapg.migrate.decide.decisions import Base, Plan
from megapg.migrate.decide.facts import Facts
from megapg.migrate.decide.functions import PARAMETER
from megapg.migrate.find.axes import axes_of
from megapg.migrate.find.carriers import MODEL_NAMES
from megapg.migrate.find.index import Index
from megapg.migrate.find.roles import has_another_role
from megapg.migrate.find.sites import Kind
from megapg.migrate.python.flow import is_ruled_out, statements_around
from megapg.migrate.python.methods import self_of
from megapg.migrate.python.scopes import Scope, Use
from megapg.migrate.reasons import UNSERVED
from megapg.upstream.mapping import COLLECTION_NAMES


@dataclass(frozen=True)
class _Asking:
    """What a function asks somewhere."""

    unit: Scope  # the function
    axes: frozenset[str]  # about which kinds of groups
    base: Base | None  # of what; None of the globals, as the use is left


def have_answered_alike(plan: Plan, index: Index, facts: Facts) -> bool:
    """Say in the facts which functions need another plan, since it serves something otherwise than
    what has to be answered alike; whether there are any.

    Args:
        plan: what is to be done.
        index: the project.
        facts: by which that was planned. The functions that make the groups or fake ranks mean
            these, and nothing beside them does. Neither do those that ask about models of several
            roles.
    """
    of_functions: dict[Scope, list[_Asking]] = defaultdict(list)
    of_classes: dict[Scope, list[_Asking]] = defaultdict(list)
    for asking in _all(plan, index):
        unit = asking.unit
        if unit in facts.tainted or has_another_role(unit):
            continue
        of_functions[unit].append(asking)
        counts = _is_of_globals(asking.base) or _is_of_self(asking)
        if counts and unit.parent is not None and unit.parent.kind == "class":
            of_classes[unit.parent].append(asking)
    apart = {unit for unit, together in of_functions.items() if _is_apart(together)}
    beside = {
        asking.unit
        for together in (*of_functions.values(), *of_classes.values())
        for asking in _beside_the_globals(together)
    }
    of_one = apart - facts.of_one - facts.parted
    parted = (apart | beside) - of_one - facts.parted
    facts.of_one |= of_one
    facts.parted |= parted
    return bool(of_one or parted)


def _is_apart(together: Sequence[_Asking]) -> bool:
    """Whether two objects are asked about one kind of group."""
    asked = [(_of(each.base), each.axes) for each in together if not _is_of_globals(each.base)]
    return any(
        one != other and axes & others
        for at, (one, axes) in enumerate(asked)
        for other, others in asked[at + 1 :]
    )


def _of(base: Base | None) -> str:
    """The variable that is asked."""
    if base is None or base.passed_first:
        return PARAMETER
    return base.expression.partition(".")[0]


def _beside_the_globals(together: list[_Asking]) -> Iterator[_Asking]:
    globals_ = frozenset[str]().union(*(e.axes for e in together if _is_of_globals(e.base)))
    for asking in together:
        if asking.axes & globals_ and not _is_of_globals(asking.base):
            yield asking


def _all(plan: Plan, index: Index) -> Iterator[_Asking]:
    for each in plan.decisions:
        unit = each.located.use.scope.unit
        if unit is not None and not _stands_in(each.located.use, unit):
            yield _Asking(unit, axes_of(each.located.site.name), each.base)
    for passing in plan.passing:
        unit = passing.reference.use.scope.unit
        if unit is not None:
            axes = frozenset[str]().union(*map(axes_of, passing.needs))
            yield _Asking(unit, axes, passing.base)
    left = {id(each.site) for each in plan.left if each.reason not in UNSERVED}
    for located in index.located:
        unit = located.use.scope.unit
        if id(located.site) in left and located.site.kind is Kind.CALL and unit is not None:
            yield _Asking(unit, axes_of(located.site.name), None)


def _stands_in(use: Use, unit: Scope) -> bool:
    """Whether a use is for where there is no collection, or no model, in a variable for one."""
    around = statements_around(use.parents, unit.node)
    names = unit.bindings.keys() & {*COLLECTION_NAMES, *MODEL_NAMES}
    return any(is_ruled_out(name, around, unit.node) for name in names)


def _is_of_globals(base: Base | None) -> bool:
    return base is None or base.expression == "None"


def _is_of_self(asking: _Asking) -> bool:
    of = _of(asking.base)
    return bool(of) and of == self_of(asking.unit)
