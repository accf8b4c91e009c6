"""Methods that read of their object what its constructor asked, and ask something else about the
same kind of groups: a rank that is kept goes with the group in which it is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from megapg.migrate.decide.decisions import GLOBALS, Decision, Plan
from megapg.migrate.decide.facts import Facts
from megapg.migrate.find.axes import asked_about
from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry
from megapg.migrate.find.roles import has_another_role
from megapg.migrate.python.methods import attributes_kept, attributes_read, class_of, self_of
from megapg.migrate.python.scopes import Scope
from megapg.upstream.mapping import COLLECTION_NAMES


def ask_what_the_constructor_asked(plan: Plan, index: Index, facts: Facts) -> bool:
    """Say in the facts which methods have to ask what their constructor asked; whether there are
    any that did not.
    """
    of_units: dict[Scope, list[Decision]] = defaultdict(list)
    for each in plan.decisions:
        if each.located.use.scope.unit is not None:
            of_units[each.located.use.scope.unit].append(each)
    kept: dict[Scope, dict[str, list[Decision]]] = defaultdict(lambda: defaultdict(list))
    for unit, decisions in of_units.items():
        klass = class_of(unit)
        if klass is not None:
            for attribute, nodes in attributes_kept(unit.node).items():
                asked = [each for each in decisions if id(each.located.node) in nodes]
                kept[klass][attribute] += asked
    is_new = False
    for unit, decisions in of_units.items() if kept else ():
        is_served = facts.is_of_globals(unit, decisions[0].located.path)
        if class_of(unit) is None and not is_served and self_of(unit):
            beside = list(_beside(unit, decisions, kept, index))
            axes = frozenset[str]().union(*(asked_about(each.located.site) for each in beside))
            if any(each.base is GLOBALS for each in beside):
                facts.parted[unit] = facts.parted.get(unit, frozenset()) | axes
                is_new = True
            elif beside and unit not in facts.of_kept:
                facts.of_kept.add(unit)
                is_new = True
    return is_new


def _beside(
    unit: Scope,
    decisions: list[Decision],
    kept: Mapping[Scope, Mapping[str, list[Decision]]],
    index: Index,
) -> Iterator[Decision]:
    """What the constructor asked and the method asks of another one."""
    klass, instance = unit.parent, self_of(unit)
    others = [e for e in decisions if e.base.expression.partition(".")[0] not in (instance, "None")]
    if klass is None or not others or has_another_role(unit):
        return
    axes = frozenset[str]().union(*(asked_about(each.located.site) for each in others))
    read = attributes_read(unit.node)
    for each in ancestry(klass, decisions[0].located.path, index.resolver):
        for attribute, asked in kept.get(each, {}).items() if isinstance(each, Scope) else ():
            for decision in asked if attribute in read else ():
                of = decision.base.expression.partition(".")[0]
                is_of_object = of == self_of(decision.located.use.scope.unit)
                is_of_object = is_of_object or of in COLLECTION_NAMES or decision.base is GLOBALS
                if is_of_object and asked_about(decision.located.site) & axes:
                    yield decision
