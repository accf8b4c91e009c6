"""Which functions get a parameter for the collection, who passes it, and what is read behind it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.decide.anyhow import Anyhow, Wanting
from megapg.migrate.decide.autograd import kept_in
from megapg.migrate.decide.decisions import Base
from megapg.migrate.decide.facts import Facts
from megapg.migrate.decide.functions import PARAMETER, Functions
from megapg.migrate.decide.references import Reference, calls_by_another_name
from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.models import ancestry
from megapg.migrate.find.roles import has_another_role
from megapg.migrate.migration import How
from megapg.migrate.python.flow import runs_before, statements_around
from megapg.migrate.python.insert import can_be_given
from megapg.migrate.python.methods import (
    body_of,
    calls_of_bases,
    class_of,
    decorators,
    is_super,
    kept_behind,
    self_of,
)
from megapg.migrate.python.scopes import Scope, Use
from megapg.upstream.mapping import GROUP_PARAMETERS, Replacement

# Further than anyone has to thread a parameter.
_DEEPEST = 5


@dataclass(eq=False)
class Edge:
    """A call of a function that takes the parameter, seen from the caller."""

    # The call; or the function, where it is given the name by which it is called.
    reference: Reference
    supply: Base  # what the caller has to pass
    caller: Scope | None  # the function that has to be given it first; None where it is there
    # The caller, where it is a constructor, and passes what its object carries.
    keeper: Scope | None = None

    @property
    def constructor(self) -> Scope | None:
        """The constructor that calls that of its base, which keeps on the same object what it
        gets.
        """
        if not isinstance(self.reference.node, ast.Attribute) or self.reference.call is None:
            return None
        unit = self.reference.use.scope.unit
        return unit if self.reference.node.attr == "__init__" and class_of(unit) else None

    def is_passed_first(self, taking: Collection[Scope]) -> bool:
        """Whether a constructor hands its base what it was passed, before what it finds."""
        return not (self.caller or self.keeper) and self.constructor in taking


class Threads:
    """Threads the parameter through the functions of a project.

    Args:
        index: the project.
        functions: of the same index.
        facts: of the same index.
        frozen: files that must stay as they are.

    Attributes:
        wanting: the functions that want the parameter, with the uses that it is to serve.
        paths: the files of the functions that may take it.
        edges: who calls each of them, once :meth:`thread` has run.
        completed: the constructors that take a collection, and are to keep it, and their files.
        of_methods: what methods read of what their constructor, or ``forward``, keeps for them.
        of_context: the methods of autograd functions that ask the context for it.
    """

    def __init__(
        self, index: Index, functions: Functions, facts: Facts, frozen: Collection[Path]
    ) -> None:
        self._index, self._functions, self._facts = index, functions, facts
        self._frozen = frozen
        self._anyhow = Anyhow(index, functions, facts)
        self.wanting: dict[Scope, list[Located]] = {}
        self.paths: dict[Scope, Path] = {}
        self.edges: dict[Scope, list[Edge]] = {}
        self.completed: dict[Scope, Path] = {}
        self.of_context: set[Scope] = set()
        self.of_methods: dict[Scope, set[str]] = {}
        self._needed: dict[Scope, set[str]] = {}  # in a function and behind it, as far as is known

    def may_take(self, function: Scope, path: Path) -> bool:
        """Whether a function can be given the parameter."""
        if path in self._frozen or function in self._facts.of_models:
            return False
        if not self._functions.can_take(function, path):
            return False
        if class_of(function) is None and self._facts.makes_groups(function, path):
            return False  # nobody has them before; an object may be given others to keep
        if function in self._facts.owning or self._facts.has_its_own_made(function):
            return False
        applied = self._functions.references.autograd.of(function, path)
        both = (applied.forward, applied.backward) if applied is not None else ()
        if any(self._facts.is_of_globals(each, path) for each in both if each is not None):
            return False  # all of it asks the globals then
        self.paths[function] = path
        return True

    def keeps(self, function: Scope, path: Path) -> bool:
        """Whether a function is a constructor that keeps what it is given, or does so for the
        ``backward`` of its autograd function.
        """
        applied = self._functions.references.autograd.of(function, path)
        if applied is not None and function is applied.forward:
            return applied.backward in self.of_context
        klass = class_of(function)
        return klass is not None and not self._functions.is_of_core(klass, path)

    # -- what methods find on self -----------------------------------------------------------

    def held_by_self(self, located: Located) -> Scope | None:
        """The constructor that can put the collection on ``self``, where a method asks; it wants
        the parameter from now on.
        """
        method = located.use.scope.unit
        constructor = self.keeper(method, located.path)
        if constructor is None:
            constructor = self._kept_by_base(located.use, located.path)
        elif isinstance(located.site.answer, Replacement):
            self.of_methods.setdefault(constructor, set()).update(located.site.answer.needs)
        if constructor is not None:
            self.wanting.setdefault(constructor, [])
        return constructor

    def complete(self, method: Scope | None, path: Path) -> None:
        """Have the constructor keep the collection that it takes, where a method asks ``self``."""
        klass = method.parent if method is not None else None
        for each in klass.defined("__init__") if klass is not None else ():
            if path not in self._frozen and self._functions.drops(each, path):
                self.completed[each] = path

    def keeper(self, method: Scope | None, path: Path) -> Scope | None:
        """The constructor that can keep a collection for a method."""
        if method is None or method.parent is None or has_another_role(method):
            return None
        applied = self._functions.references.autograd.of(method, path)
        if applied is not None and method is applied.backward:
            return applied.forward if self.may_take(applied.forward, path) else None
        if not self_of(method) or not is_usual_method(method):
            return None
        for each in method.parent.defined("__init__"):
            if self.keeps(each, path) and self.may_take(each, path):
                return each
        return None

    def of_object(self, method: Scope | None, path: Path, how: How, form: str = "resolve") -> Base:
        """What a method finds where its object keeps what its constructor was passed; one of an
        autograd function in the context, in the form that is given.
        """
        if method is None or self._functions.references.autograd.of(method, path) is None:
            return Base(how, "groups_of", self_of(method))
        self.of_context.add(method)
        return Base(how, form, kept_in(method, PARAMETER))

    def _kept_by_base(self, use: Use, path: Path) -> Scope | None:
        """The constructor of the base that keeps the collection, where one with ``**kwargs``, which
        hands these on to it, has done so.
        """
        constructor = use.scope.unit
        klass, only_base = class_of(constructor), self._functions.references.only_base
        base = only_base(klass, path) if klass is not None else None
        for _ in range(_DEEPEST):
            if base is not None and "__init__" not in base[0].bindings:
                base = only_base(*base)
        if constructor is None or base is None or has_another_role(constructor):
            return None
        around = statements_around(use.parents, constructor.node)
        if not any(
            runs_before(statement, around, constructor.node)
            for statement in kept_behind(constructor) or ()
            if _hands_on(statement, constructor)
        ):
            return None
        if not self._index.modules.sees(base[1], path):
            return None  # a class of the tests does not make one of the source keep something
        of_base = next(iter(base[0].defined("__init__")), None)
        return self.keeper(of_base, base[1])

    def kept_behind(
        self, function: Scope, path: Path, taking: Collection[Scope]
    ) -> tuple[ast.stmt, ...]:
        """The calls behind which a constructor has to keep what it was passed; none where all of
        them pass it on, or there is no other constructor that keeps something.
        """
        if not self.keeps(function, path):
            return ()
        others = self.above(function, path, taking)
        passed = {
            id(edge.reference.call)
            for edge in self._to_bases(others, function, taking)
            if edge.is_passed_first(taking) or edge.caller is None or edge.caller in taking
        }
        if not others or all(id(call) in passed for call in calls_of_bases(function.node)):
            return ()
        return tuple(kept_behind(function) or ())

    def is_kept_above(self, function: Scope, path: Path, taking: Collection[Scope]) -> bool:
        """Whether the first that a constructor does is to pass what it was passed to that of its
        base, which keeps it.
        """
        node = function.node
        if not isinstance(node, ast.FunctionDef):
            return False
        others, calls = self.above(function, path, taking), calls_of_bases(node)
        passed = [
            edge.reference.call
            for edge in self._to_bases(others[:1], function, taking)
            if edge.supply.expression == PARAMETER and not edge.is_passed_first(taking)
        ]
        first = body_of(node)[0]
        of_base = [each for each in others[:1] if self.keeps(each, self.paths[each])]
        is_alone = len(calls) == 1 and any(each is calls[0] for each in passed)
        return (
            bool(of_base) and is_alone and isinstance(first, ast.Expr) and first.value is calls[0]
        )

    def above(self, function: Scope, path: Path, taking: Collection[Scope]) -> list[Scope]:
        """The constructors of the bases of a constructor's class that take the parameter."""
        klass = class_of(function)
        return [
            each
            for above in (ancestry(klass, path, self._index.resolver) if klass else ())
            if isinstance(above, Scope) and above is not klass
            for each in above.defined("__init__")
            if each in taking
        ]

    def _to_bases(
        self, others: Iterable[Scope], function: Scope, taking: Collection[Scope]
    ) -> Iterator[Edge]:
        """The calls of some constructors that pass what a constructor was passed, if anything."""
        same = (PARAMETER, self_of(function))
        for other in others:
            for edge in self.edges.get(other, ()):
                if edge.is_passed_first(taking) or edge.supply.expression in same:
                    yield edge

    # -- who passes it -----------------------------------------------------------------------

    def thread(self) -> dict[Scope, None]:
        """The functions that get the parameter: those that want it, and those between them and
        a caller that has something to pass. Which ones of the source is decided without the tests.
        """
        of_source, of_tests = list[Scope](), list[Scope]()
        for function in self.wanting:
            is_test = self._index.modules.is_test(self.paths[function])
            (of_tests if is_test else of_source).append(function)
        taking = self._reach(of_source)
        for function in taking:
            found = self._functions.references_in_tests(function, self.paths[function])
            edges = list(self._callers(function, found))
            self.edges[function] += edges
            of_tests += [caller for edge in edges if (caller := edge.caller or edge.keeper)]
        taking |= self._reach(of_tests)
        for name in set(self._index.config.thread_from) - set(map(_name, taking)):
            raise UnsupportedOptionError(
                f"--thread-from {name}: no function or class of that qualified name can take "
                f"{PARAMETER} and calls, at most {_DEEPEST} calls away, what turns to the globals. "
                "The report of a run without it names some to start from."
            )
        return taking

    def _reach(self, wanting: Collection[Scope]) -> dict[Scope, None]:
        """Of functions that want the parameter, or call one that takes it, those that get it, and
        those between them and a caller that has something to pass.
        """
        reached: dict[Scope, int] = dict.fromkeys(wanting, 0)
        waiting = list(reached)
        for function in waiting:  # grows
            found = self._functions.references.of(function, self.paths[function])
            self.edges[function] = list(self._callers(function, found))
            for edge in self.edges[function]:
                caller, depth = edge.caller or edge.keeper, reached[function] + 1
                if caller is not None:
                    self._needed.setdefault(caller, set()).update(self._needs_of(function))
                if caller is not None and caller not in reached and depth <= _DEEPEST:
                    reached[caller] = depth
                    waiting.append(caller)
        useful = {
            function
            for function in reached
            if (function in self.wanting and self._wants_it_anyhow(function))
            or any(edge.caller is None for edge in self.edges[function])
            or _name(function) in self._index.config.thread_from
        }
        before = -1
        while before != len(useful):
            before = len(useful)
            useful |= {
                function
                for function in reached
                if any(edge.caller in useful for edge in self.edges[function])
            }
        waiting = [each for each in reached if each in useful]
        for function in waiting:  # grows
            below = [each for each in self._of_classes_below(function) if each in reached]
            if useful.isdisjoint(below):
                useful.update(below)
                waiting += below
        return {function: None for function in reached if function in useful}

    def _of_classes_below(self, constructor: Scope) -> list[Scope]:
        """The constructors that call a constructor, of a class that nothing else is made of than
        other classes: an object is passed by way of these what it is to keep.
        """
        known = self._functions.references.of(constructor, self.paths[constructor])
        edges = self.edges[constructor]
        if len(edges) < len(known) or not all(each.constructor for each in edges):
            return []
        return [each.caller for each in edges if each.caller is not None]

    def _needs_of(self, function: Scope) -> set[str]:
        """The fields that are read in a function and behind it, as far as that is known yet."""
        answers = (each.site.answer for each in self.wanting.get(function, ()))
        own = {need for each in answers if isinstance(each, Replacement) for need in each.needs}
        return own | self.of_methods.get(function, set()) | self._needed.get(function, set())

    def _wants_it_anyhow(self, function: Scope) -> bool:
        """Whether a function is to take the parameter though nobody may have something to pass."""
        passing = [edge.reference for edge in self.edges[function]]
        of = Wanting(function, self.paths[function], self.wanting[function], passing)
        return self._anyhow.is_to_take(of)

    def may_pass(self, reference: Reference) -> bool:
        """Whether the parameter can be passed where a function is called."""
        call, path = reference.call, reference.path
        calls = calls_by_another_name(reference) if call is None else [call]
        keywords = [keyword.arg for each in calls for keyword in each.keywords]
        if path in self._frozen or any(k is None or k == PARAMETER for k in keywords):
            return False
        if any(isinstance(each, ast.JoinedStr) for each in reference.use.parents):
            return False
        looked = self._index.look(path)
        return looked is not None and (not call or can_be_given(call, looked[0]))

    def all_pass(
        self, function: Scope, references: Sequence[Reference], taking: Collection[Scope]
    ) -> bool:
        """Whether all who call a function have something to pass, or take the parameter."""
        edges = list(self._callers(function, references))
        return len(edges) == len(references) and all(
            each.reference.call is not None and (each.caller is None or each.caller in taking)
            for each in edges
        )

    def _callers(self, function: Scope, references: Sequence[Reference]) -> Iterator[Edge]:
        for reference in references:
            call, path = reference.call, reference.path
            calls = calls_by_another_name(reference) if call is None else [call]
            if not calls or not self.may_pass(reference):
                continue
            keywords = [keyword.arg for each in calls for keyword in each.keywords]
            # It is looked up in vain where the group that is passed is all that is needed.
            groups = [GROUP_PARAMETERS[k] for k in keywords if k and k in GROUP_PARAMETERS]
            if groups and self._needs_of(function) <= {*chain(*groups)}:
                continue
            unit = reference.use.scope.unit
            around = reference.use.scope.enclosing("function")  # of the body of a class in it, too
            of = unit or (around and around.unit)
            just_passed = self._facts.may_only_be_passed(of, path)
            if self._facts.is_of_globals(of, path) and not just_passed:
                continue
            if function in self._facts.passable and self._facts.calls_what_fakes(of, path):
                continue
            found = [] if just_passed else self._index.carriers(reference.use, path)
            supply = self._facts.best(found, reference.use, path)
            if supply is not None:
                if call is not None or not _is_rebound(supply, reference.use.scope):
                    keeper = None  # what its object carries, it was passed: that comes first
                    if class_of(unit) is not None and supply.expression == self_of(unit):
                        keeper = self.keeper(unit, path)
                    yield Edge(reference, supply, None, keeper)
            elif unit is not None and self.may_take(unit, path):
                yield Edge(reference, Base(How.THREADED, "plain", PARAMETER), unit)
            elif (
                not just_passed
                and unit is not None
                and (
                    constructor := self.keeper(unit, path)
                    or self._kept_by_base(reference.use, path)
                )
            ):
                kept = self.of_object(unit, path, How.THREADED, "plain")
                yield Edge(reference, kept, constructor)


def _name(function: Scope) -> str:
    """Of a constructor that of its class."""
    return (class_of(function) or function).qualname


def _is_rebound(supply: Base, function: Scope) -> bool:
    """Whether it may be another one when something is called than when that was given a name."""
    found = function.find(supply.expression.partition(".")[0])
    return found is not None and len(found[1]) > 1


def _hands_on(statement: ast.stmt, constructor: Scope) -> bool:
    """Whether a statement is ``super().__init__`` with the ``**kwargs`` of the constructor."""
    match statement, getattr(constructor.node, "args", None):
        case ast.Expr(ast.Call(ast.Attribute(owner), _, given)), ast.arguments(kwarg=ast.arg(name)):
            starred = [each.value for each in given if each.arg is None]
            handed_on = any(isinstance(each, ast.Name) and each.id == name for each in starred)
            return handed_on and is_super(owner, constructor)
    return False


def is_usual_method(method: Scope) -> bool:
    """Whether a method is called with its object, when that has its attributes."""
    special = method.name.startswith("__") and method.name not in ("__call__", "__init__")
    return not special and not decorators(method.node) & {"classmethod", "staticmethod"}
