"""Objects that carry nothing but the collection of their constructor: their methods read that."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

from megapg.migrate.decide.decisions import Base, Decision, Plan
from megapg.migrate.decide.functions import PARAMETER
from megapg.migrate.decide.references import References
from megapg.migrate.find.index import Index
from megapg.migrate.python.methods import class_of, self_of
from megapg.migrate.python.scopes import Scope, Use
from megapg.upstream.mapping import MODEL_ATTRIBUTES

# What makes an object, or gives it attributes, beside its constructor.
_OTHER_MAKERS = frozenset({"__new__", "__setstate__", "__reduce__", "__reduce_ex__", "__getattr__"})
_UNMAKING = (b"__new__", b"pickle", b"torch.load(")


def read_what_is_kept(plan: Plan, index: Index, references: References) -> Plan:
    """A plan whose methods read the attribute where they would have their object searched, and it
    has nothing else: no base, no model, and nobody but its class's name makes it.
    """
    keeping = {
        klass
        for each in plan.taking
        if each.kept
        and each.at_first
        and (klass := class_of(each.function)) is not None
        and _is_plain(klass, each.path, index, references)
    }

    def read(base: Base, use: Use) -> Base:
        unit = use.scope.unit
        instance = self_of(unit)
        is_searched = base.form == "groups_of" and base.expression == instance
        if unit is None or unit.parent not in keeping or not is_searched or base.passed_first:
            return base
        return replace(base, form="resolve", expression=f"{instance}.{PARAMETER}", reads=())

    whys, decisions = {}, list[Decision]()
    for each in plan.decisions:
        changed = replace(each, base=read(each.base, each.located.use))
        decisions.append(changed)
        if each in plan.whys:
            whys[changed] = plan.whys[each]
    plan.decisions, plan.whys = decisions, whys
    plan.passing = [replace(e, base=read(e.base, e.reference.use)) for e in plan.passing]
    return plan


def _is_plain(klass: Scope, path: Path, index: Index, references: References) -> bool:
    node = klass.node
    assert isinstance(node, ast.ClassDef)
    if [each for each in node.bases if ast.unparse(each) != "object"] or node.keywords:
        return False
    if (
        _OTHER_MAKERS & klass.bindings.keys()
        or {*MODEL_ATTRIBUTES, "net"} & klass.attributes.keys()
    ):
        return False
    if any(references.made_of(klass.name, path)):
        return False
    return not any(word in index.data(path) for word in _UNMAKING)
