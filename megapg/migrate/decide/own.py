"""Which objects carry nothing but the collection that their constructor was passed. Their methods
read that, ``self.pg_collection``, where others have ``groups_of(self)`` look for it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megapg.migrate.decide.decisions import Base, Passing, Plan, Taking
from megapg.migrate.decide.functions import PARAMETER
from megapg.migrate.find.carriers import PLAIN, is_as_written
from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry, has_a_model
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.methods import class_of, kept, self_of
from megapg.migrate.python.scopes import Scope, Use, is_named, last_name, scopes
from megapg.upstream.mapping import MODEL_ATTRIBUTES

# By which an object may lack what its constructor gives it, or have more.
_OTHERWISE = frozenset(
    {"__setattr__", "__getstate__", "__setstate__"}
    | {"__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__slots__"}
)


def ask_what_is_kept(plan: Plan, index: Index) -> Plan:
    """Have objects that carry nothing else asked for the collection that they were passed."""
    kept = _Kept(plan, index)
    for at, decision in enumerate(plan.decisions):
        located = decision.located
        if kept.serves(decision.base, located.use, located.path):
            plan.decisions[at] = replace(decision, base=_of_kept(decision.base))
            if decision in plan.whys:
                plan.whys[plan.decisions[at]] = plan.whys.pop(decision)
    for at, passing in enumerate(plan.passing):
        if kept.serves(passing.base, passing.reference.use, passing.reference.path):
            form = "plain" if kept.takes_none(passing) else "resolve"
            plan.passing[at] = replace(passing, base=_of_kept(passing.base, form))
    return plan


def _of_kept(base: Base, form: str = "resolve") -> Base:
    return replace(base, form=form, expression=f"{base.expression}.{PARAMETER}")


@dataclass(frozen=True, eq=False)
class _Kept:
    """Finds out which methods find on their object what it was passed, and nothing else."""

    plan: Plan
    index: Index

    def serves(self, base: Base, use: Use, path: Path) -> bool:
        """Whether what serves a use is what its object was passed."""
        method = use.scope.unit
        if base.form != "groups_of" or method is None or base.expression != self_of(method):
            return False
        return class_of(method) is None and self._is_plain.get(method.parent, False)

    def takes_none(self, passing: Passing) -> bool:
        """Whether what is called takes None as well, since it gets the parameter."""
        call = passing.reference.call
        called = last_name(call.func) if isinstance(call, ast.Call) else ""
        return not passing.group and (passing.path, called) in self._taking

    @cached_property
    def _taking(self) -> set[tuple[Path, str]]:
        """What gets the parameter: the file, and what it is called by."""
        named = ((e.path, class_of(e.function) or e.function) for e in self.plan.taking if e.is_new)
        return {(path, scope.name) for path, scope in named}

    @cached_property
    def _is_plain(self) -> dict[Scope | None, bool]:
        found: dict[Scope | None, bool] = {}
        for each in self.plan.taking:
            klass = class_of(each.function)
            if klass is not None and each.kept:
                found[klass] = self._keeps_nothing_else(klass, each)
        return found

    def _keeps_nothing_else(self, klass: Scope, taking: Taking) -> bool:
        above = list(ancestry(klass, taking.path, self.index.resolver))
        return (
            taking.is_new
            and taking.at_first
            and len(klass.bindings["__init__"]) == 1
            and all(
                each.rpartition(".")[2] in PLAIN if isinstance(each, str) else _shows_all(each)
                for each in above
            )
            and all(self._is_only_made(e.name) for e in above if isinstance(e, Scope))
            and not {*self.index.everywhere("__new__")} & {*self.index.everywhere(klass.name)}
        )

    @kept
    def _is_only_made(self, klass: str) -> bool:
        """Whether source and tests do nothing with the classes of a name but make objects: no class
        below may leave their constructor out, nobody calls their methods with another object, and
        no file that names them gives an object a model from outside.
        """
        for path in self.index.everywhere(klass):
            analysis = self.index.analysis(path)
            words = None if analysis is None else _words_of(analysis)
            if words is None or klass in words.renamed or words.gives_models:
                return False
            if not all(_makes(use, klass) for use in words.uses.get(klass, ())):
                return False
        return True


@dataclass(frozen=True)
class _Words:
    """What a file does with names."""

    uses: Mapping[str, Sequence[Use]]  # where each is said, be it within a chain
    renamed: Collection[str]  # what is imported under another name
    gives_models: bool  # whether what is no ``self`` is given a model, or another class


@kept
def _words_of(analysis: Analysis) -> _Words:
    uses: dict[str, list[Use]] = defaultdict(list)
    for use in analysis.uses:
        node = use.node
        while isinstance(node, ast.Attribute):
            uses[node.attr].append(use)
            node = node.value
        if isinstance(node, ast.Name):
            uses[node.id].append(use)
    nodes = [node for scope in scopes(analysis.module) for node in scope.nodes]
    given = (each for each in nodes if isinstance(each, ast.Attribute))
    return _Words(
        uses,
        {e.name for n in nodes if isinstance(n, ast.ImportFrom) for e in n.names if e.asname},
        any(
            isinstance(each.ctx, ast.Store)
            and each.attr in (*MODEL_ATTRIBUTES, "__class__")
            and not is_named(each.value, "self")
            for each in given
        ),
    )


def _makes(use: Use, klass: str) -> bool:
    """Whether a class is called there, or says what something is."""
    outer = use.parents.node
    if last_name(use.node) != klass:
        return False
    if isinstance(outer, ast.Call):
        return outer.func is use.node or last_name(outer.func) == "isinstance"
    return isinstance(outer, ast.arg | ast.FunctionDef) or (
        isinstance(outer, ast.AnnAssign) and outer.annotation is use.node
    )


@kept
def _shows_all(klass: Scope) -> bool:
    """Whether the statements of a class tell all that its objects have."""
    node = klass.node
    sets_by_name = any(
        is_named(each, "setattr")
        or (isinstance(each, ast.Attribute) and each.attr == "__dict__")
        or (isinstance(each, ast.Call) and _saves_its_object(each))
        for each in ast.walk(node)
    )
    return (
        is_as_written(klass)
        and klass.bindings.keys().isdisjoint({*_OTHERWISE, *MODEL_ATTRIBUTES})
        and not sets_by_name
        and not has_a_model(klass)
    )


def _saves_its_object(call: ast.Call) -> bool:
    """Whether what was written before the migration may be read after it."""
    saves = last_name(call.func) in ("dump", "dumps", "save")
    return saves and any(is_named(each, "self") for each in call.args)
