"""What objects ask that have nothing but the collection which they were passed: that, as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megapg.migrate.decide.decisions import Base, Passing, Plan, Taking
from megapg.migrate.decide.functions import PARAMETER
from megapg.migrate.decide.references import References
from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry, has_a_model
from megapg.migrate.python.methods import calls_of_bases, class_of, self_of
from megapg.migrate.python.scopes import Scope, Use, is_named, last_name

# What a class may be made of outside of the project: nothing that gives its objects anything.
_PLAIN = frozenset({"object", "ABC", "Generic"})
# By which an object may lack what its constructor gives it, or have more.
_OTHERWISE = frozenset(
    {"__new__", "__getattr__", "__getattribute__", "__setattr__", "__setstate__", "__reduce__"}
    | {"__reduce_ex__", "__copy__", "__deepcopy__", "__slots__"}
)


def ask_what_is_kept(plan: Plan, index: Index, references: References) -> Plan:
    """Have objects that carry nothing else asked for the collection that they were passed."""
    kept = _Kept(plan, index, references)
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


@dataclass(frozen=True)
class _Kept:
    """Finds out which methods find on their object what it was passed, and nothing else."""

    plan: Plan
    index: Index
    references: References

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
        return (
            taking.is_new
            and taking.at_first
            and self._is_plainly_made(klass, taking.path)
            and all(
                self._is_made_as(klass, each, path)
                for each, path in self._below(klass, taking.path)
            )
            and not self._is_called_with_others(klass)
            and not {*self.index.everywhere("__new__")} & {*self.index.everywhere(klass.name)}
        )

    def _below(self, klass: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        """The classes that are made of one, at any remove."""
        found = [(klass, path)]
        for above, at in found:  # grows
            for each in self.references.made_of(above.name, at):
                if each not in found:
                    found.append(each)
                    yield each

    def _is_plainly_made(self, klass: Scope, path: Path) -> bool:
        """Whether what a class and those above it say is all that its objects have."""
        return all(
            each.rpartition(".")[2] in _PLAIN if isinstance(each, str) else _is_as_written(each)
            for each in ancestry(klass, path, self.index.resolver)
        )

    def _is_made_as(self, klass: Scope, below: Scope, path: Path) -> bool:
        """Whether objects of a class below have what those of this class have, and nothing else."""
        makers = below.defined("__init__")
        return self._is_plainly_made(below, path) and all(
            any(
                isinstance(each, ast.Expr) and each.value in calls_of_bases(maker.node)
                for each in getattr(maker.node, "body", ())
            )
            for maker in makers
        )

    def _is_called_with_others(self, klass: Scope) -> bool:
        """Whether a method is read from the class, and may be called with any object."""
        methods = {name for name in klass.bindings if any(map(self_of, klass.defined(name)))}
        analyses = map(self.index.analysis, self.index.everywhere(klass.name))
        return any(
            isinstance(use.node, ast.Attribute)
            and use.node.attr in methods - {"__init__"}
            and is_named(use.node.value, klass.name)
            and not _is_called_with_self(use)
            for each in analyses
            if each is not None
            for use in each.uses
        )


def _is_called_with_self(use: Use) -> bool:
    """Whether a method calls that of a class above for its own object."""
    call, method = use.parents.node, use.scope.unit
    if not isinstance(call, ast.Call) or method is None or not call.args:
        return False
    return is_named(call.args[0], self_of(method))


def _is_as_written(klass: Scope) -> bool:
    node = klass.node
    sets_by_name = any(
        is_named(each, "setattr") or (isinstance(each, ast.Attribute) and each.attr == "__dict__")
        for each in ast.walk(node)
    )
    return (
        isinstance(node, ast.ClassDef)
        and not node.decorator_list
        and not node.keywords
        and klass.bindings.keys().isdisjoint(_OTHERWISE)
        and not sets_by_name
        and not has_a_model(klass)
    )
