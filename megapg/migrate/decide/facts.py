"""Facts about a project that hold for many of its uses: who fakes ranks, makes groups, patches."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megapg.migrate.decide.decisions import Base, best
from megapg.migrate.decide.exchanged import exchanging, owning
from megapg.migrate.decide.gaps import Gaps
from megapg.migrate.decide.outlived import Renewals
from megapg.migrate.decide.references import References
from megapg.migrate.find.axes import group_argument
from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.models import ancestry
from megapg.migrate.find.sites import Carrier, Kind, Site
from megapg.migrate.migration import How
from megapg.migrate.python.flow import blocks, statements_around
from megapg.migrate.python.methods import class_of, kept, left_out, self_of
from megapg.migrate.python.scopes import FunctionNode, Scope, Use
from megapg.upstream.mapping import COLLECTION_NAMES, GROUP_PARAMETERS, RANK_GLOBALS, Takes

# Writes that make a rank or size differ from what the groups say.
_FAKING = frozenset({"setter", "assigned"})
# Further than anyone has the groups made.
_DEEPEST = 5


@dataclass
class FallenBack:
    """Functions that fall back, since what was written of an earlier plan mixed carriers."""

    # Those that the globals serve, and about which kinds of groups.
    parted: dict[Scope, frozenset[str]] = field(default_factory=dict)
    left: set[Scope] = field(default_factory=set)  # those whose uses stay, as that did not help
    why: dict[Scope, str] = field(default_factory=dict)  # for each of both, what was found
    # Those that are to ask what they are passed, and no model, with their files, and who calls
    # them and has a collection.
    handed: dict[Scope, tuple[Path, set[Scope]]] = field(default_factory=dict)


class Facts:
    """Facts about the project of an index, each found out once.

    Attributes:
        tainted: functions in which nothing but the globals, and what is passed, can serve: they
            fake a rank or size, are called by one that does, or have the groups made or exchanged.
        making: those of them that have the groups made, or exchanged, themselves.
        passable: those of them that are free, and are only called by one that fakes: others may
            pass them a collection.
        parted: functions that the globals serve as well, and the kinds of groups about which they
            do, since nothing else can serve all that is to be answered alike.
        of_one: functions that several models could serve. Their object does, or what is passed, and
            no other model.
        fallen: the functions that fall back, as the check of an earlier result found.
        of_models: constructors that get no collection, for their objects have the model that is
            asked beside them.
        of_passed: constructors that ask their object, which has the model that they would ask.
        of_kept: methods that ask their object, and no model, since they read of it what its
            constructor asked.
        renewals: where functions have the groups made anew.
        of_complete: functions that ask no collection which lacks some groups: they need these.
        handed: functions that ask what they are passed, and no model, as who calls them does.
        of_self: methods that nothing else serves than their object, as it does its other methods.
    """

    def __init__(self, index: Index, references: References, fallen: FallenBack) -> None:
        self._index, self._references, self.fallen = index, references, fallen
        self._gaps = Gaps(index)
        self.renewals = Renewals(index, self.makes_groups)
        faking, reached = self._reached_by_fakes()
        self.making = self.owning | exchanging(index, references)
        self.tainted = reached | self.making
        self.passable = {
            each
            for each in reached - faking - self.making
            if each.parent is not None and each.parent.kind == "module"
        }
        self._faking = faking
        self._leaving = _returning(each for each in index.located if _fakes(each.site))
        self.parted: dict[Scope, frozenset[str]] = dict(fallen.parted)
        self.of_one: set[Scope] = set()
        self.of_models: set[Scope] = set()
        self.of_passed: set[Scope] = set()
        self.of_kept: set[Scope] = set()
        self.of_complete: set[Scope | None] = set()
        self.handed: set[Scope] = set()
        self.of_self: set[Scope] = set()

    def best(self, found: Sequence[Carrier], use: Use, path: Path) -> Base | None:
        """The first certain of the carriers that are found somewhere."""
        unit = use.scope.unit
        found = [self._gaps.told(each, use, path) for each in found]
        found = [each for each in found if not self._is_left_out(each, unit, path)]
        found = [e for e in found if not self.renewals.outdate(e.expression, use, path)]
        if unit in self.of_complete:
            found = [each for each in found if each.fields is None]
        if unit in self.handed:
            found = [each for each in found if each.kind == "collection"]
        if unit in self.of_one:
            if self_of(unit) and class_of(unit) is None:
                found = [each for each in found if each.origin not in ("local", "inner")]
            else:
                found = [each for each in found if each.kind == "collection"]
        if unit in self.of_kept:
            found = [e for e in found if e.expression.partition(".")[0] == self_of(unit)]
        is_of_self = unit in self.of_self or unit in self.of_kept
        return best(found) or (Base(How.MODEL, "groups_of", self_of(unit)) if is_of_self else None)

    def _is_left_out(self, carrier: Carrier, unit: Scope | None, path: Path) -> bool:
        """Whether it is a parameter for a model that some caller leaves None."""
        if unit is None or carrier.kind != "model" or not carrier.may_be_none:
            return False
        return carrier.expression in self._left_out(unit, path)

    @kept
    def _left_out(self, unit: Scope, path: Path) -> frozenset[str]:
        """The parameters of a function that a call of it does not pass."""
        calls = [each.call for each in self._references.of(unit, path) if each.call is not None]
        return frozenset[str]().union(*(left_out(unit, call) for call in calls))

    def is_of_globals(self, unit: Scope | None, path: Path) -> bool:
        """Whether the globals serve what a function asks, or a part of it, be it since a run of
        before.
        """
        return unit in self.tainted or unit in self.parted or unit in self._served_before(path)

    def asks_globals(self, base: Base, unit: Scope | None, path: Path) -> bool:
        """Whether the globals serve a function, or, where it would ask its object, another method
        of the class, be it since an earlier run.
        """
        others = self.beside(unit, path) if unit and base.expression == self_of(unit) else ()
        return any(self.is_of_globals(each, path) for each in (unit, *others))

    @kept
    def _served_before(self, path: Path) -> frozenset[Scope | None]:
        """The functions of a file in which ``resolve(None)`` is written already."""
        if b"resolve(None" not in self._index.data(path):
            return frozenset()
        return frozenset(
            unit
            for unit, calls in self.calls_in(path).items()
            for _, call in calls
            if ast.unparse(call).endswith("resolve(None)")
        )

    def written_at(self, located: Located) -> Site | None:
        """Where the function of a use first writes a private variable of the globals."""
        return self._writing.get((located.use.scope.unit, located.path))

    @cached_property
    def _writing(self) -> dict[tuple[Scope | None, Path], Site]:
        found: dict[tuple[Scope | None, Path], Site] = {}
        for each in self._index.located:
            if _writes_a_variable(each.site):
                found.setdefault((each.use.scope.unit, each.path), each.site)
        return found

    def replaced_at(self, located: Located) -> Site | None:
        """Where something is put in the place of a getter for good, as far as a use sees it."""
        sees = self._index.modules.sees
        found = self._replaced.get(located.site.name, ())
        return next((each.site for each in found if sees(located.path, each.path)), None)

    @cached_property
    def _replaced(self) -> dict[str, list[Located]]:
        """The getters, and lists of ranks, in whose place something is put, for good."""
        found: dict[str, list[Located]] = {}
        for each in self._index.located:
            name = each.site.name
            if _is_replaced(each) and (not name.startswith("_") or name in RANK_GLOBALS):
                found.setdefault(name, []).append(each)
        return found

    @cached_property
    def owning(self) -> set[Scope]:
        """Functions that make or end the groups themselves: what they read is what they made, and
        a model that they have may carry groups of before.
        """
        return owning(self._index)

    @kept
    def makes_groups(self, unit: Scope | None, path: Path) -> bool:
        """Whether a function calls one that makes the groups, be it by way of others. Whether there
        are any it asks of the globals then: it makes them where they have none.
        """
        found = {unit: path} if unit is not None and self.owning else {}
        for _ in range(_DEEPEST):
            if not self.owning.isdisjoint(found):
                return True
            for each, at in list(found.items()):
                found.update(self._references.called_by(each, at))
        return False

    def has_its_own_made(self, constructor: Scope) -> bool:
        """Whether a function is a constructor of objects that have a method which makes the groups,
        whether there are any or not: nobody has a collection of these when such an object is made.
        """
        klass = class_of(constructor)
        made = self.owning - self._minding - {constructor}
        return klass is not None and any(each.parent is klass for each in made)

    @cached_property
    def _minding(self) -> set[Scope | None]:
        """Functions that ask whether there are groups."""
        return {
            each.use.scope.unit
            for each in self._index.located
            if getattr(each.site.answer, "takes", None) is Takes.OPTIONAL
        }

    def is_closed(self, unit: Scope | None) -> bool:
        """Whether nothing but the globals may serve a function, as it fakes a rank or the like."""
        return unit in self.tainted and unit not in self.passable

    def may_only_be_passed(self, unit: Scope | None, path: Path) -> bool:
        """Whether nothing that a function has itself may serve it, and what others pass does."""
        return unit in self.passable and not (
            unit in self.parted or unit in self._served_before(path)
        )

    def calls_what_fakes(self, unit: Scope | None, path: Path) -> bool:
        """Whether a function has a rank or a size faked: what it calls then is to hear that. One
        that fakes and returns at once, and else has the groups made, does not count: Megatron's
        ``initialize_megatron`` fakes only where it is told to wait.
        """
        called = self._references.called_by(unit, path) if unit is not None and self._faking else ()
        faking = [(each, at) for each, at in called if each in self._faking]
        return any(e not in self._leaving or not self.makes_groups(e, at) for e, at in faking)

    def _reached_by_fakes(self) -> tuple[set[Scope], set[Scope]]:
        """Functions that fake a rank or a size, and those that are decorated with one or handed to
        it; these and what they call: only the globals know what was faked.
        """
        found: dict[Scope, Path] = {}
        for located in self._index.located:
            unit = located.use.scope.unit
            if unit is not None and _fakes(located.site):
                found[unit] = located.path
        for unit, path in list(found.items()):
            handed = self._handed_to(unit, path)
            found.update((each, at) for each, at in handed if self._index.modules.sees(at, path))
        faking = set(found)
        waiting = list(found.items())
        while waiting:
            caller, path = waiting.pop()
            for callee, at in self._references.called_by(caller, path):
                if callee not in found and self._index.modules.sees(at, path):
                    found[callee] = at
                    waiting.append((callee, at))
        return faking, set(found)

    def _handed_to(self, function: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        """The functions that a function is to call: it decorates them, or is passed them."""
        for reference in self._references.of(function, path):
            use, at = reference.use, reference.path
            outer = use.parents.node
            if isinstance(outer, ast.Call) and outer.func is reference.node:
                for each in outer.args:
                    for thing in self._index.resolver.expression(each, use.scope, at):
                        if thing.kind == "function" and thing.scope and thing.path:
                            yield thing.scope, thing.path
                outer = use.parents.above.node if use.parents.above else outer
            if isinstance(outer, FunctionNode):
                named = (e.func if isinstance(e, ast.Call) else e for e in outer.decorator_list)
                if any(each is reference.node for each in named):
                    for decorated in use.scope.defined(outer.name):
                        if decorated.node is outer:
                            yield decorated, at

    def calls_in(self, path: Path) -> Mapping[Scope | None, Sequence[tuple[Use, ast.Call]]]:
        """What is called in a file, by the functions that do."""
        analysis = self._index.analysis(path)
        return analysis.calls if analysis else {}

    @kept
    def without_a_group(self, unit: Scope, path: Path) -> Sequence[Use]:
        """The calls of a function by which Megatron-core communicates on the tensor parallel group
        of the globals, since they pass none.
        """
        return [
            use
            for use, call in self.calls_in(path).get(unit, ())
            if group_argument(call)
            and (
                self.is_of_globals_module(use, path)  # as the older ones had it
                or any(
                    each.kind == "name" and each.name.startswith("megatron.core.")
                    for each in self._index.resolver.expression(use.node, use.scope, path)
                )
            )
        ]

    def is_of_globals_module(self, use: Use, path: Path) -> bool:
        """Whether what is used is taken from ``parallel_state``."""
        found = self._index.resolver.expression(use.node, use.scope, path)
        return any(each.kind == "member" for each in found)

    def asked_by_autograd(
        self, unit: Scope, path: Path, passed: Collection[int]
    ) -> Mapping[Scope, Path]:
        """The methods of the autograd functions that a function applies, and the functions that
        these call in turn, where nobody passes a group to any of them.

        Args:
            unit: the function.
            path: of its file.
            passed: the calls that pass one, by their identity.
        """
        found: dict[Scope, Path] = {}
        for use, call in self.calls_in(path).get(unit, ()):
            if (
                id(call) in passed
                or not isinstance(use.node, ast.Attribute)
                or use.node.attr != "apply"
            ):
                continue
            for thing in self._index.resolver.expression(use.node.value, use.scope, path):
                if thing.kind == "class" and thing.scope is not None and thing.path is not None:
                    above = ancestry(thing.scope, thing.path, self._index.resolver)
                    if any(isinstance(e, str) and e.endswith("autograd.Function") for e in above):
                        of = (thing.scope.defined(name) for name in ("forward", "backward"))
                        found.update((each, thing.path) for some in of for each in some)
        for _ in range(_DEEPEST):
            for each, at in list(found.items()):
                found.update(self._references.called_by(each, at))
        return found

    def beside(self, unit: Scope, path: Path) -> list[Scope]:
        """A function; of a method all of its class that call something: these ask one object."""
        if unit.parent is None or unit.parent.kind != "class":
            return [unit]
        return self._calling_in(unit.parent, path)

    @kept
    def _calling_in(self, klass: Scope, path: Path) -> list[Scope]:
        return [each for each in self.calls_in(path) if each and each.parent is klass]


def has_parts_built(facts: Facts, constructor: Scope, path: Path) -> bool:
    """Whether a function is a constructor of objects that have Megatron-core build their parts by a
    specification, and pass them no groups: these ask the globals.
    """
    named = (None, *COLLECTION_NAMES, *GROUP_PARAMETERS)
    return class_of(constructor) is not None and any(
        isinstance(call.func, ast.Name)
        and call.func.id == "build_module"
        and not any(each.arg in named for each in call.keywords)
        for method in facts.beside(constructor, path)
        for _, call in facts.calls_in(path).get(method, ())
    )


def _fakes(site: Site) -> bool:
    """Whether a rank or a size is faked there."""
    return site.reason in _FAKING and (
        site.name.startswith(("set_", "_MPU_")) or site.kind is Kind.ASSIGNED
    )


def _returning(places: Iterable[Located]) -> set[Scope]:
    """The functions that return right behind each of some places."""
    staying, found = set[Scope](), set[Scope]()
    for each in places:
        unit = each.use.scope.unit
        if unit is not None:
            around = statements_around(each.use.parents, unit.node)
            outer = around[-2] if len(around) > 1 else unit.node
            last = next(block[-1] for block in blocks(outer) if around[-1] in block)
            (found if isinstance(last, ast.Return) else staying).add(unit)
    return found - staying


def _is_replaced(located: Located) -> bool:
    """Whether a site puts something in the place of a getter, for good."""
    if located.site.kind is not Kind.PATCHED:
        return located.site.kind is Kind.ASSIGNED
    call = located.node
    return (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "setattr"
    )


def _writes_a_variable(site: Site) -> bool:
    """Whether a site puts something into a private variable of the globals, be it whatever."""
    if site.kind not in (Kind.ASSIGNED, Kind.PATCHED, Kind.STRING):
        return False
    return site.name.startswith("_") or (site.kind is Kind.PATCHED and not site.name)
