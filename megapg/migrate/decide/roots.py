"""Why functions turn to the globals: the end of the way on which a collection would have come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from megapg.migrate.decide.decisions import Decision
from megapg.migrate.decide.facts import Facts
from megapg.migrate.decide.functions import PARAMETER, Functions
from megapg.migrate.decide.references import Reference, calls_by_another_name
from megapg.migrate.decide.threads import Threads, is_usual_method
from megapg.migrate.find.roles import has_another_role
from megapg.migrate.migration import SHIMS, Why
from megapg.migrate.python.methods import self_of
from megapg.migrate.python.scopes import Scope
from megapg.upstream.mapping import GROUP_PARAMETERS, Takes


class Roots:
    """Answers why a use may end at the globals.

    Args:
        functions: of the project.
        facts: of the same.
        threads: once :meth:`Threads.thread` has run.
        taking: the functions that get the parameter.
        fed: those of them to which every caller passes a collection.
    """

    def __init__(
        self,
        functions: Functions,
        facts: Facts,
        threads: Threads,
        taking: Collection[Scope],
        fed: Collection[Scope],
    ) -> None:
        self._functions, self._facts, self._threads = functions, facts, threads
        self._taking, self._fed = taking, fed
        self._known: dict[Scope, Why] = {}
        self._found: set[Scope] = set()

    def whys(self, decisions: Iterable[Decision]) -> dict[Decision, Why]:
        """For each use that may end at the globals, why."""
        found = ((each, self.why(each)) for each in decisions)
        return {each: why for each, why in found if why is not None}

    def why(self, decision: Decision) -> Why | None:
        """Why what a use asks may be the globals; None where it never is."""
        base, located = decision.base, decision.located
        unit, path = located.use.scope.unit, located.path
        if base.how not in SHIMS:
            return None
        if decision.answer.takes is Takes.GLOBALS:
            return Why.OF_THE_JOB
        if unit is None:
            return Why.MODULE_LEVEL
        if unit in self._facts.tainted and unit not in self._taking:
            return Why.MAKES_GROUPS if unit in self._facts.making else Why.FAKES
        if base.expression == "None":
            return Why.ALIKE if unit in self._facts.parted else self._of(unit, path)
        if base.expression == PARAMETER and unit not in self._taking:
            return Why.MAY_BE_NONE
        return self._of(unit, path)

    def _of(self, unit: Scope, path: Path) -> Why:
        """Why a function, or the object of a method, has no collection of a caller."""
        waiting, found = [(unit, path)], self._found
        while waiting:  # a chain of callers may be longer than Python's stack: the first one first
            each, of = waiting[-1]
            if each not in self._known:
                self._known[each] = Why.UNSEEN  # for one that calls itself
                waiting += self._above(each, of)
                continue
            waiting.pop()
            if each not in found:
                found.add(each)
                self._known[each] = self._find(each, of)
        return self._known[unit]

    def _above(self, unit: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        """What has to be known first: why those that call it have none, or make its object."""
        klass = unit.parent
        makers = klass.defined("__init__") if klass is not None and klass.kind == "class" else []
        if (forward := self._forward_of(unit, path)) is not None:
            makers = [forward]
        yield from ((each, path) for each in makers[:1])
        for reference in self._functions.references.of(unit, path) or ():
            caller = reference.use.scope.unit
            if caller is not None:
                yield caller, reference.path

    def _forward_of(self, unit: Scope, path: Path) -> Scope | None:
        """What may keep the collection for the ``backward`` of an autograd function."""
        applied = self._functions.references.autograd.of(unit, path)
        return applied.forward if applied is not None and unit is applied.backward else None

    def _find(self, unit: Scope, path: Path) -> Why:
        if unit in self._threads.edges:
            return self._of_callers(unit, path)
        if (forward := self._forward_of(unit, path)) is not None:
            return self._known.get(forward, Why.UNSEEN)
        hindrance = self._functions.in_the_way(unit, path)
        if hindrance is None:
            makes_them = self._facts.makes_groups(unit, path) or self._facts.has_its_own_made(unit)
            return Why.MAKES_GROUPS if makes_them else Why.TOO_FAR
        klass = unit.parent
        if hindrance not in (Why.METHOD, Why.ANY_KEYWORD, Why.DECORATED) or klass is None:
            return hindrance
        if klass.kind != "class" or unit.name == "__init__":
            return hindrance
        if has_another_role(unit):
            return Why.OTHER_ROLES
        if not self_of(unit) or not is_usual_method(unit):
            odd = self._functions.oddity(klass, path)
            return Why.AUTOGRAD if odd is Why.AUTOGRAD else Why.METHOD
        constructor = next(iter(klass.defined("__init__")), None)
        if constructor is None:
            return self._functions.oddity(klass, path) or Why.NO_CONSTRUCTOR
        if self._functions.is_of_core(klass, path):
            return Why.BASE_OUTSIDE
        return self._known.get(constructor, Why.UNSEEN)

    def _of_callers(self, function: Scope, path: Path) -> Why:
        """Why a function that takes the parameter is passed none by some caller."""
        known = self._functions.references.of(function, path)
        if not known:
            return Why.UNCALLED
        edges = {id(each.reference): each for each in self._threads.edges[function]}
        of_callers = Why.UNSEEN
        for reference in known:
            edge = edges.get(id(reference))
            if edge is None:
                return self._bare(reference)
            if edge.supply.optional:
                of_callers = Why.MAY_BE_NONE
            elif edge.caller is not None and edge.caller not in self._fed:
                found = self._known.get(edge.caller, Why.UNSEEN)
                of_callers = found if of_callers is Why.UNSEEN else of_callers
        return of_callers

    def _bare(self, reference: Reference) -> Why:
        """Why a place that names a function passes nothing to it."""
        unit = reference.use.scope.unit
        if reference.call is None and not calls_by_another_name(reference):
            return Why.HANDED_ON
        if unit is None:
            return Why.MODULE_LEVEL
        if self._facts.is_of_globals(unit, reference.path):
            if unit in self._facts.parted or unit not in self._facts.tainted:
                return Why.ALIKE
            return Why.MAKES_GROUPS if unit in self._facts.making else Why.FAKES
        keywords = {each.arg for each in reference.call.keywords} if reference.call else set()
        if keywords & {None, PARAMETER, *GROUP_PARAMETERS}:
            return Why.HAS_GROUPS
        return self._known.get(unit, Why.UNSEEN)
