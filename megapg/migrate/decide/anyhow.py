"""Which functions take a collection though nobody in the project may have one to pass, so that they
can be passed one from outside, or one day.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.decide.facts import Facts, has_parts_built
from megapg.migrate.decide.functions import Functions
from megapg.migrate.decide.references import Reference
from megapg.migrate.find.index import Index, Located
from megapg.migrate.migration import Why
from megapg.migrate.python.flow import is_ruled_out, statements_around
from megapg.migrate.python.methods import class_of
from megapg.migrate.python.scopes import Opaque, Scope, last_name
from megapg.upstream.mapping import ANY_GROUP, GROUP_PARAMETERS, Replacement


@dataclass(frozen=True)
class Wanting:
    """A function that can take a collection, and what is known of it.

    Args:
        function: the function, or the constructor.
        path: of its file.
        sites: the uses in it.
        passing: the places that call it and have one, or can be given one first.
    """

    function: Scope
    path: Path
    sites: Sequence[Located]
    passing: Sequence[Reference]


class Anyhow:
    """Answers that question.

    Args:
        index: the project.
        functions: of the same index.
        facts: of the same index.
    """

    def __init__(self, index: Index, functions: Functions, facts: Facts) -> None:
        self._index, self._functions, self._facts = index, functions, facts

    def is_to_take(self, of: Wanting) -> bool:
        """Whether a function is to take the parameter though nobody may have something to pass: no
        autograd function is.
        """
        return not (
            self._functions.references.autograd.of(of.function, of.path)
            or of.function in self._facts.passable
            or _has_its_own(of)
            or self._is_called_from_outside(of)
            or self._is_called_back(of)
            or self._is_private(of)
            or has_parts_built(self._facts, of.function, of.path)
            or self._index.modules.is_test(of.path)
        )

    def _known(self, of: Wanting) -> list[Reference]:
        return self._functions.references.of(of.function, of.path)

    def _is_called_back(self, of: Wanting) -> bool:
        """Whether a function is nothing but an argument of calls: these call it as they know it."""
        known = [each for each in self._known(of) if not _is_marked(each)]
        return class_of(of.function) is None and bool(known) and all(map(_is_argument, known))

    def _is_private(self, of: Wanting) -> bool:
        """Whether nobody but this project calls a function, and there nobody has a collection, or
        whoever can be given one wants none.
        """
        if not of.function.name.startswith("_") or class_of(of.function):
            return False
        known = self._known(of)
        return self._functions.references.all_seen(of.function) and all(
            each in of.passing or self._is_without(each) for each in known
        )

    def _is_without(self, reference: Reference) -> bool:
        """Whether a function is called where there is no collection."""
        unit, path = reference.use.scope.unit, reference.path
        if reference.call is None:
            return False
        if self._facts.is_of_globals(unit, path):
            return True
        carriers = self._index.carriers(reference.use, path)
        return self._facts.best(carriers, reference.use, path) is None

    def _is_called_from_outside(self, of: Wanting) -> bool:
        """Whether nothing but methods that another project calls, of data sets and of autograd
        functions, calls a function: they have no collection, and are passed none.
        """
        if of.passing or class_of(of.function) is not None:
            return False
        known = self._known(of)
        classes = [(e.use.scope.unit and e.use.scope.unit.parent, e.path) for e in known]
        return bool(classes) and all(
            klass is not None
            and klass.kind == "class"
            and self._functions.oddity(klass, path) in (Why.BASE_OUTSIDE, Why.AUTOGRAD)
            for klass, path in classes
        )


def _has_its_own(of: Wanting) -> bool:
    """Whether a function takes groups as it is, turns to the globals where it was passed none
    only, and nobody in the project who calls it so has a collection.
    """
    if of.passing or not of.sites or class_of(of.function) is not None:
        return False
    return all(_stands_in(located, of.function) for located in of.sites)


def _stands_in(located: Located, function: Scope) -> bool:
    """Whether a use is what a function takes where a parameter of its own, for a group, is None."""
    return any(stands_in_for(located, function, name) for name in function.bindings)


def stands_in_for(located: Located, function: Scope, name: str) -> bool:
    """Whether a use is what a function takes where that parameter, for a group, is None."""
    answer, bound = located.site.answer, function.bindings[name]
    if located.use.scope is not function or not isinstance(answer, Replacement):
        return False
    return (
        isinstance(bound[0], Opaque)
        and bound[0].parameter
        and (name in ANY_GROUP or answer.field in GROUP_PARAMETERS.get(name, ()))
        and is_ruled_out(name, statements_around(located.use.parents, function.node), function.node)
    )


def _is_argument(reference: Reference) -> bool:
    """Whether a call is given a function as it is, and not to bind arguments of it."""
    match reference.use.parents.node:
        case ast.keyword():
            return True
        case ast.Call(func):
            return reference.node is not func and last_name(func) != "partial"
    return False


def _is_marked(reference: Reference) -> bool:
    """Whether a function is given an attribute, as ``provider.is_distributed = True``."""
    match reference.use.node:
        case ast.Attribute(value, _, ast.Store()):
            return value is reference.node
    return False
