"""Which functions of a new text have a collection, or a model, and call what still asks the globals
about the same kind of groups, or the other way round. Those to which nobody passes a collection
fall back for that; for the others there is a report, and who reads it cures it.

Nothing here knows how the edits were planned: the new text is read, and what is written there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megapg.migrate.edit.absent import in_place_of
from megapg.migrate.edit.applied import Applied
from megapg.migrate.edit.asked import (
    Asked,
    Called,
    asked_outside,
    by_way_of,
    name_of,
    of_globals,
    reported,
)
from megapg.migrate.edit.called import is_of_a_core
from megapg.migrate.edit.handed import Handed
from megapg.migrate.edit.lacking import (
    all_of_groups,
    handed,
    named_in,
    not_passed,
    without_any,
)
from megapg.migrate.edit.makers import Makers
from megapg.migrate.edit.mixing import GLOBALS, PASSED, TextOfFile, definitions_in, text_of
from megapg.migrate.edit.modelled import Modelled
from megapg.migrate.edit.objects import Objects
from megapg.migrate.edit.parts import Parts
from megapg.migrate.edit.shared import Shared
from megapg.migrate.edit.values import Values, in_order
from megapg.migrate.find.axes import axes_of
from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import Thing
from megapg.migrate.migration import Callee
from megapg.migrate.python.analysis import Analysis, analyse
from megapg.migrate.python.methods import (
    class_of,
    is_self,
    is_super,
    kept,
    parameters,
    self_of,
    setting_up,
)
from megapg.migrate.python.scopes import Alias, FunctionNode, Opaque, Scope, Use, last_name
from megapg.upstream.mapping import COLLECTION_NAMES

# Further than anybody follows what is reported.
_DEEPEST = 4


@dataclass(frozen=True)
class Calling:
    """A function with such a call."""

    path: Path  # of its file
    number: int  # which one of its file, as definitions_in() has them
    callee: Callee
    lacks_it: bool = False  # whether what it calls takes a collection, and is passed none
    # Where a method goes with what its object's constructor was passed, and calls an autograd
    # function that can't be: that constructor, and about which kinds of groups.
    constructor: tuple[Path, int] | None = None
    axes: frozenset[str] = frozenset()


class Callees:
    """The calls by which functions of the source that have a collection have something else asked.

    Args:
        index: the project, with its old texts.
        trees: the new texts, parsed, by their files.
    """

    def __init__(self, index: Index, trees: Mapping[Path, ast.Module]) -> None:
        self._index, self._trees = index, trees
        self._resolver = index.resolver_of(self._analysis)
        self._known: dict[tuple[Scope, frozenset[str]], list[Asked]] = {}
        self._asking: set[tuple[Scope, frozenset[str]]] = set()
        self._cut = 0  # how often a circle was cut short: what came of it is not for keeps

    def of_models(self) -> Iterator[tuple[tuple[Path, int], tuple[Path, int]]]:
        """The functions that ask a model, and are called by what asks its collection; and the ones
        that call: the file of each, and which one of that it is.
        """
        modelled = Modelled(self._text, self._calls_in, self._functions_called)
        for path in self._source:
            for function, at, caller in modelled.of_file(path):
                places = self._places(at)[function.node], self._places(path)[caller.node]
                yield (at, places[0]), (path, places[1])

    @cached_property
    def _source(self) -> list[Path]:
        """The files, without tests, in which something may ask what is not the globals."""
        runtime = self._index.config.vendored or "megapg"
        paths = {*self._trees, *self._index.everywhere(runtime.rpartition(".")[2])}
        return sorted(each for each in paths if not self._index.modules.is_test(each))

    def of_globals(self) -> list[Calling]:
        """Those that have the globals asked, by file and line."""
        found = [each for path in self._source for each in self._of_file(path)]
        return sorted(found, key=lambda each: (each.callee.file, each.callee.line))

    # -- texts -------------------------------------------------------------------------------

    def _analysis(self, path: Path) -> Analysis | None:
        return analyse(tree) if (tree := self._trees.get(path)) else self._index.analysis(path)

    @kept
    def _text(self, path: Path) -> TextOfFile | None:
        looked = self._index.look(path)
        if looked is None:
            return None
        config, tree = self._index.config, self._trees.get(path, looked[0].tree)
        runtime = config.vendored or "megapg"
        return text_of(tree, looked[0].name, config.versions, self._has_core, runtime)

    @cached_property
    def _has_core(self) -> bool:
        return any(is_of_a_core(path.as_posix()) for path, _ in self._index.analyses())

    def _calls_in(self, path: Path) -> Mapping[Scope | None, Sequence[tuple[Use, ast.Call]]]:
        """What is called in a file, by the functions that do."""
        return analysis.calls if (analysis := self._analysis(path)) else {}

    def _is_new(self, unit: Scope, path: Path) -> bool:
        """Whether a migration changed a function, be it an earlier one."""
        text = self._text(path)
        assert text is not None  # it asks something
        ours, node = text.names.megapg | text.names.getters, unit.node
        if any(isinstance(each, ast.Name) and each.id in ours for each in unit.nodes):
            return True
        looked, at = self._index.look(path), self._places(path)[node]
        old = definitions_in(looked[0].tree)[at] if looked is not None else node
        return old is not node and ast.dump(old) != ast.dump(node)

    @kept
    def _places(self, path: Path) -> Mapping[ast.AST, int]:
        text = self._text(path)
        return {each: at for at, each in enumerate(text.definitions if text is not None else ())}

    # -- who calls ---------------------------------------------------------------------------

    def _of_file(self, path: Path) -> Iterator[Calling]:
        text = self._text(path)
        if text is None:
            return
        for unit, calls in self._calls_in(path).items():
            if unit is None:
                continue
            beside = self._objects.asked_beside(unit, path)
            own, direct = _has(unit, text, beside), _has(unit, text, ())
            found: list[tuple[ast.Call, Callee, Asked, bool]] = []
            for use, call in calls:
                inner = _has_inside(use.scope, unit, text)
                there = {each for each in {*own.values()} if _is_there(each, unit, call)}
                has = inner | {axis: each for axis, each in own.items() if each in there}
                if has:
                    found += self._of_call(use, call, has, bool(direct or inner), path)
            handed = [] if direct else list(self._handed.reported(unit, path))
            if handed and self._makers.has(unit, path):
                handed = []
            stands_in = in_place_of(unit, COLLECTION_NAMES) if found or handed else set()
            asking = {unit: path, **dict(beside.values())}
            if found and any(self._is_new(each, at) for each, at in asking.items()):
                for call, callee, asked, lacks_it in found:
                    if id(call) not in stands_in:
                        yield self._calling(unit, path, callee, asked, beside, lacks_it)
            if handed and self._is_new(unit, path):
                for call, callee in handed:
                    if id(call) not in stands_in:
                        yield Calling(path, self._places(path)[unit.node], callee)

    def _calling(
        self,
        unit: Scope,
        path: Path,
        callee: Callee,
        asked: Asked,
        beside: Mapping[str, tuple[Scope, Path]],
        lacks_it: bool,
    ) -> Calling:
        number, axes = self._places(path)[unit.node], asked.axes & beside.keys()
        makers = [beside[each] for each in sorted(axes) if class_of(beside[each][0]) is not None]
        if not makers or not asked.applied or asked.unless:
            return Calling(path, number, callee, lacks_it)
        maker, at = makers[0]
        return Calling(path, number, callee, lacks_it, (at, self._places(at)[maker.node]), axes)

    def _of_call(
        self, use: Use, call: ast.Call, has: Mapping[str, str], direct: bool, path: Path
    ) -> Iterator[tuple[ast.Call, Callee, Asked, bool]]:
        unit, text = use.scope.unit, self._text(path)
        assert unit is not None  # that was asked
        assert text is not None
        of_project = self._called(use, call, unit, path)
        versions = self._index.config.versions
        for name, one in () if of_project else asked_outside(call, unit, text, versions):
            if not has.keys().isdisjoint(one.axes):
                yield call, reported(text.name, call, unit, has, name, one), one, False
        cures = set[str]()
        for called in (*of_project, *self._by_value(use, call, path)):
            if called.function is unit or self._makers.has(called.function, called.path):
                continue
            axes = {*has}
            if self_of(called.function) and self._objects.are_of_one(called.function, unit, path):
                of_it = (self_of(unit), PASSED if class_of(unit) is not None else "")
                axes = {each for each in has if has[each] not in of_it}  # that is its own matter
            asked = self._behind(called, 0)
            if last_name(use.node) == "__init__":  # what a base asks, too, is named there
                its = self._objects.asked_beside(called.function, called.path).keys()
                asked = [each for each in asked if each.unless or its.isdisjoint(each.axes)]
            found = next((each for each in asked if each.axes & axes), None)
            lacking = next((each for each in asked if each.unless in COLLECTION_NAMES), None)
            if found is None and has and direct:  # about whatever it asks it is to be handed this
                found = lacking
            if found is None and class_of(called.function) and _sets_up(unit, has):
                found = next(iter(asked), None)  # so is a part of an object
            if found is not None:
                callee = reported(text.name, call, unit, has, name_of(called.function), found)
                if (cure := found.unless or callee.callee) not in cures:  # one argument serves all
                    cures.add(cure)
                    yield call, callee, found, lacking is not None

    # -- who is called -----------------------------------------------------------------------

    @kept
    def _called(self, use: Use, call: ast.Call, unit: Scope, path: Path) -> list[Called]:
        """The functions of the project that a call runs."""
        return list(self._find_called(use, call, unit, path))

    def _find_called(self, use: Use, call: ast.Call, unit: Scope, path: Path) -> Iterator[Called]:
        things = in_order(self._resolver.expression(use.node, use.scope, path))
        handed_back = self._values.handed_back(use, call, path)
        named = ((each, call) for each in things)
        for thing, its_call in (*named, *self._parts.built(call), *handed_back):
            for of, at in self._objects.run_by((thing,)):
                yield Called(of, at, not_passed(of, its_call, unit))
        if not isinstance(use.node, ast.Attribute):
            return
        for method, at, handed_none in self._objects.methods_called(use, path):
            yield Called(method, at, not_passed(method, call, unit), handed_none)
        if use.node.attr == "apply":
            for method, at, left_out in self._applied.run_by(use.node.value, call, use, path):
                yield Called(method, at, left_out)
        elif use.node.attr == "__init__" and is_super(use.node.value, unit):
            klass = class_of(unit)
            for above, at in self._objects.bases(klass, path) if klass is not None else ():
                for constructor, where in self._objects.constructor(above, at):
                    yield Called(constructor, where, not_passed(constructor, call, unit))

    def _functions_called(
        self, use: Use, call: ast.Call, unit: Scope, path: Path
    ) -> list[tuple[Scope, Path]]:
        return [(e.function, e.path) for e in self._called(use, call, unit, path)]

    def _by_value(self, use: Use, call: ast.Call, path: Path) -> Iterator[Called]:
        """The functions that a call runs, or that run later, as values which are handed on."""
        unit, values = use.scope.unit, self._values
        assert unit is not None  # that was asked
        for of, at in self._objects.run_by(values.handed_to(use, path)):
            yield Called(of, at, not_passed(of, call, unit))
        yield from self._later(values.handed_by(use, call, path))
        yield from self._later(values.kept_by(use, call, path))
        for of, at in self._objects.run_by(values.bound(use, call, path)):
            yield Called(of, at, all_of_groups(of) - named_in(call, unit))

    @kept
    def _run_behind(self, use: Use, call: ast.Call, unit: Scope, path: Path) -> list[Called]:
        """The functions that a call runs, or hands to what runs them later."""
        later = self._later(self._values.kept_by(use, call, path))
        return [*self._called(use, call, unit, path), *later]

    def _later(self, things: Iterable[Thing]) -> Iterator[Called]:
        """What runs where some things are called by others, which pass them no groups."""
        for of, at in self._objects.run_by(things):
            yield Called(of, at, all_of_groups(of))

    @cached_property
    def _applied(self) -> Applied:
        return Applied(self._resolver)

    @cached_property
    def _handed(self) -> Handed:
        return Handed(self._text, self._calls_in, self._functions_called)

    @cached_property
    def _makers(self) -> Makers:
        return Makers(self._calls_in, self._functions_called)

    @cached_property
    def _objects(self) -> Objects:
        return Objects(self._resolver, self._text, self._shared)

    @cached_property
    def _shared(self) -> Shared:
        return Shared(self._resolver, self._text, self._calls_in)

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self._index, self._resolver, self._calls_in)

    @cached_property
    def _values(self) -> Values:
        return Values(self._index, self._resolver, self._calls_in)

    def _behind(self, called: Called, depth: int) -> list[Asked]:
        """What a function asks of the globals, or those that it calls: its own first. What it asks
        something else about is its own matter.
        """
        known = self._known.get(called.key)
        if known is not None:
            return known
        if called.key in self._asking or depth > _DEEPEST:
            self._cut += 1
            return []
        self._asking.add(called.key)
        cut = self._cut
        found = self._behind_of(called, depth)
        self._asking.discard(called.key)
        if cut == self._cut:
            self._known[called.key] = found
        return found

    def _behind_of(self, called: Called, depth: int) -> list[Asked]:
        text, unit = self._text(called.path), called.function
        node = unit.node
        if text is None or not isinstance(node, FunctionNode):
            return []
        asked = text.asked_by(node)
        found = list(of_globals(asked, called, text.name))
        answered = [
            each
            for each in asked
            if each.carrier != GLOBALS
            and each.carrier not in called.left_out
            and not (called.handed_none and each.carrier == self_of(unit))
        ]
        versions = self._index.config.versions
        takes_one = not {*COLLECTION_NAMES}.isdisjoint(unit.bindings)
        stands_in = in_place_of(unit, COLLECTION_NAMES) if takes_one else set()
        for use, call in self._calls_in(called.path).get(unit, ()):
            is_asked = id(call) not in stands_in or called.left_out & {*COLLECTION_NAMES}
            run = self._run_behind(use, call, unit, called.path) if is_asked else []
            to_core = is_asked and not run
            outside = asked_outside(call, unit, text, versions, called) if to_core else []
            if not run and not outside:
                continue
            there = (e.what for e in answered if _is_there(e.carrier, unit, call))
            own = frozenset[str]().union(*map(axes_of, there))
            for _, one in outside:
                if not one.axes <= own:
                    found.append(replace(one, axes=one.axes - own) if one.axes & own else one)
            for each in run:
                is_own = isinstance(use.node, ast.Attribute) and is_self(use.node.value, unit)
                of = called.handed_none if is_own else each.handed_none
                filled = handed(each.function, call, called.left_out)
                lacking = each.left_out | without_any(each.function, call, called.left_out)
                further = Called(each.function, each.path, lacking, of)
                for one in self._behind(further, depth + 1):
                    unless = "" if one.unless in COLLECTION_NAMES else filled.get(one.unless, "")
                    if not one.axes <= own:
                        found.append(replace(one, axes=one.axes - own, unless=unless))
        return by_way_of(
            found, self._applied.of(unit, called.path), "" if takes_one else name_of(unit)
        )


def _sets_up(unit: Scope, has: Mapping[str, str]) -> bool:
    """Whether a method makes an object what it is, which was passed a collection: its parts are
    to have that, whatever they ask it for.
    """
    klass = unit.parent
    if klass is None or klass.kind != "class" or not {self_of(unit), PASSED} & {*has.values()}:
        return False
    makers = klass.defined("__init__")
    taking = any(e.arg in COLLECTION_NAMES for each in makers for e in parameters(each.node))
    return taking and (unit in makers or unit.name in setting_up(klass.node))


def _has(unit: Scope, text: TextOfFile, beside: Iterable[str]) -> dict[str, str]:
    """About which kinds of groups a function asks something else than the globals, and what; a
    method also those about which its object is asked.
    """
    node, own = unit.node, dict.fromkeys(beside, self_of(unit))
    if not isinstance(node, FunctionNode):
        return {}
    asked = [each for each in text.asked_by(node) if not each.by_core]
    if any(each.carrier == GLOBALS for each in asked):
        return own  # it asks these for everything else
    return own | {axis: each.carrier for each in asked for axis in axes_of(each.what)}


def _has_inside(scope: Scope, unit: Scope, text: TextOfFile) -> dict[str, str]:
    """The same of the functions in one in which something is, as far as they ask models of their
    own.
    """
    inner = scope if scope is not unit else None
    found: dict[str, str] = {}
    while inner is not None and inner is not unit:
        named = {each.arg for each in parameters(inner.node)} - {*COLLECTION_NAMES}
        own = _has(inner, text, ()) if named else {}
        found = {axis: each for axis, each in own.items() if each in named} | found
        inner = inner.parent
    return found


@kept
def _assignments(unit: Scope) -> list[tuple[int, int]]:
    """The first and the last lines of the assignments in a function."""
    assigned = (each for each in unit.nodes if isinstance(each, ast.Assign))
    return [(each.lineno, each.end_lineno or each.lineno) for each in assigned]


def _is_there(carrier: str, unit: Scope, call: ast.Call) -> bool:
    """Whether a variable of a function has what it asks when something is called: what makes a
    model can't be handed one.
    """
    bound = [e for e in unit.bindings.get(carrier, ()) if isinstance(e, Alias | Opaque)]
    if not bound:
        return True
    is_passed = isinstance(bound[0], Opaque) and bound[0].parameter
    end = call.end_lineno or call.lineno
    around = (  # the name may be on a line before
        first for first, last in _assignments(unit) if first <= call.lineno <= end <= last
    )
    lines = range(max(around, default=call.lineno), end + 1)
    makes_it = any(each.line in lines for each in bound[is_passed:])
    return not makes_it and (is_passed or bound[0].line < call.lineno)
