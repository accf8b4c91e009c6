"""From where each use is to be served, and which functions get a parameter for it.

Best first: a group or a collection in scope, a model that carries one, a parameter that is threaded
from callers that have one of these, and last ``megapg.resolve()``, which takes what was passed and
else the globals. Each is chosen only where it gives what the getter would have given.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megapg.migrate.carriers import ancestry, calls_of_bases, carriers, is_super
from megapg.migrate.flow import first_read, is_ruled_out, runs_before, statements_around
from megapg.migrate.functions import (
    PARAMETER,
    Functions,
    Reference,
    calls_by_another_name,
    class_of,
    decorators,
    kept_behind,
    mentions,
    unit_of,
)
from megapg.migrate.index import Index, Located
from megapg.migrate.insert import add_argument, add_statement
from megapg.migrate.locate import is_shown, quote_in
from megapg.migrate.mapping import GROUP_PARAMETERS, Refusal, Replacement, Takes
from megapg.migrate.migration import How, Left, Style
from megapg.migrate.roles import has_another_role
from megapg.migrate.scopes import Defined, Instance, Opaque, Scope, Use
from megapg.migrate.sites import Carrier, Kind, Site

# Further than anyone has to thread a parameter.
_DEEPEST = 5
# More groups than these are passed as a collection, whatever the style.
_MOST_GROUPS = 3
# Writes that make a rank or size differ from what the groups say.
_FAKING = frozenset({"setter", "assigned"})
# Parameters that hold whichever group a caller means.
_ANY_GROUP = frozenset({"group", "process_group"})
_OWNING = frozenset({"initialize_model_parallel", "destroy_model_parallel"})


@dataclass(frozen=True)
class Base:
    """An expression for a collection, or for a group.

    Attributes:
        how: from what it serves.
        form: ``resolve`` of the expression; ``groups_of`` it, with the fields that are read, or
            ``of_collection``, without, for a collection has them or not; ``group`` for a group;
            the expression ``plain``.
        expression: what is at hand.
        optional: whether what is at hand may be None.
        made_here: whether it is a model that a variable of the function holds.
        passed_first: whether what was passed to the function comes before it.
    """

    how: How
    form: str
    expression: str
    optional: bool = False
    made_here: bool = False
    passed_first: bool = False


_GLOBALS = Base(How.RESOLVED, "resolve", "None")


@dataclass(frozen=True, eq=False)
class Decision:
    """A use and what serves it."""

    located: Located
    answer: Replacement
    base: Base


@dataclass(frozen=True, eq=False)
class Passing:
    """A call that is given the collection, or a function that is called by another name.

    Attributes:
        reference: the call, or the function.
        path: of the file of the function that is called.
        base: what it is given.
        needs: the fields that are read behind it.
        fields: those of which it is given a group each, in place of a collection.
    """

    reference: Reference
    path: Path
    base: Base
    needs: tuple[str, ...]
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Taking:
    """A function that gets the parameter.

    Attributes:
        function: its scope.
        path: of its file.
        kept: whether it is a constructor that keeps it on ``self``.
        behind: the statements behind which it is kept: those of bases keep what they are passed,
            which is not that.
        fields: of which it gets a group each, in place of a collection.
        first: the statement before which groups that were not passed are looked up.
    """

    function: Scope
    path: Path
    kept: bool
    fields: tuple[str, ...] = ()
    first: ast.stmt | None = None
    behind: tuple[ast.stmt, ...] = ()


@dataclass
class Plan:
    """What is to be done, in all files together."""

    decisions: list[Decision] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    kept: int = 0
    taking: list[Taking] = field(default_factory=list)
    passing: list[Passing] = field(default_factory=list)


def make_plan(
    index: Index,
    functions: Functions,
    frozen: Collection[Path] = (),
    *,
    style: Style = Style.COLLECTION,
    unsafe: bool = False,
) -> Plan:
    """Decide about every site of an index.

    Args:
        index: the project.
        functions: of the same index.
        style: what functions are given.
        unsafe: also rewrite what may behave differently where groups are missing.
        frozen: files that must stay as they are.
    """
    return _Planner(index, functions, frozen, style, unsafe).run()


@dataclass(eq=False)
class _Edge:
    """A call of a function that takes the parameter, seen from the caller.

    Attributes:
        reference: the call; or the function, where it is given the name by which it is called.
        supply: what the caller has to pass.
        caller: the function that has to be given it first; None where it is there.
        keeper: the caller, where it is a constructor, and passes what its object carries.
    """

    reference: Reference
    supply: Base
    caller: Scope | None
    keeper: Scope | None = None


class _Planner:
    def __init__(
        self,
        index: Index,
        functions: Functions,
        frozen: Collection[Path],
        style: Style,
        unsafe: bool,
    ) -> None:
        self._index, self._functions, self._frozen = index, functions, frozen
        self._style, self._unsafe = style, unsafe
        self._plan = Plan()
        self._owning = self._owning_groups()
        self._tainted = self._reached_by_fakes() | self._owning
        self._writing = {
            (unit_of(each.use.scope), each.path)
            for each in index.located
            if _writes_a_variable(each.site)
        }
        self._patched = {
            each.site.name
            for each in index.located
            if _is_replaced(each) and not each.site.name.startswith("_")
        }
        self._wanting: dict[Scope, list[Located]] = {}
        self._paths: dict[Scope, Path] = {}
        self._edges: dict[Scope, list[_Edge]] = {}
        self._optional: list[tuple[Located, Replacement]] = []
        self._of_self: list[tuple[Located, Scope]] = []
        self._of_locals: list[tuple[Located, Base]] = []
        self._of_methods: dict[Scope, set[str]] = {}

    def run(self) -> Plan:
        """Decide."""
        for located in self._index.located:
            self._look_at(located)
        for located, base in self._of_locals:
            unit = unit_of(located.use.scope)
            if unit is not None and unit in self._wanting:
                self._wanting[unit].append(located)  # what was passed is asked first
            else:
                self._decide(located, base)
        taking = self._thread()
        fed = self._fed(taking)
        narrow = {
            function: first
            for function in taking
            if (first := self._looked_up_at(function, taking)) is not None
        }
        for function, sites in self._wanting.items():
            for located in sites:
                base = _parameter(function in fed) if function in taking else _GLOBALS
                if function in narrow and isinstance(located.site.answer, Replacement):
                    base = Base(base.how, "group", group_name(located.site.answer.field))
                self._decide(located, base)
        for located, constructor in self._of_self:
            how = How.THREADED if constructor in fed else How.RESOLVED
            self._decide(located, Base(how, "groups_of", _self_of(unit_of(located.use.scope))))
        for located, answer in self._optional:
            unit = unit_of(located.use.scope)
            given = PARAMETER if unit in taking else "None"
            form = "plain" if answer.takes is Takes.OPTIONAL else "groups_of"
            how = How.THREADED if unit in fed else How.RESOLVED
            self._decide(located, Base(how, form, given, optional=True))
        needs = self._needs_of(taking)
        for function in taking:
            path = self._paths[function]
            fields = needs[function] if function in narrow else ()
            self._plan.taking.append(
                Taking(
                    function,
                    path,
                    self._keeps(function, path),
                    fields,
                    narrow.get(function),
                    self._kept_behind(function, path, taking),
                )
            )
            for edge in self._edges.get(function, ()):
                if edge.caller is None or edge.caller in taking:
                    supply = edge.supply
                    if fields and supply.form == "plain":
                        supply = Base(supply.how, "resolve", supply.expression)
                    if _is_passed_first(edge, taking):
                        supply = replace(supply, passed_first=True)
                    passing = Passing(edge.reference, path, supply, needs[function], fields)
                    self._plan.passing.append(passing)
        return self._plan

    # -- one use -----------------------------------------------------------------------------

    def _look_at(self, located: Located) -> None:
        site, answer = located.site, located.site.answer
        if site.keep:
            self._plan.kept += 1
        elif isinstance(answer, Refusal):
            self._plan.left.append(Left(site, answer.reason, answer.detail))
        elif (why := self._why_not(located, answer)) is not None:
            self._plan.left.append(Left(site, *why, site.replacement))
        elif answer.takes is Takes.GLOBALS:
            self._decide(located, _GLOBALS)
        elif answer.takes in (Takes.OPTIONAL, Takes.LAZY):
            base, unit = _best(site.carriers), unit_of(located.use.scope)
            is_guard = answer.takes is Takes.OPTIONAL and self._makes_groups(unit, located.path)
            if base is None or base.optional or self._is_tainted(unit) or is_guard:
                self._optional.append((located, answer))
            else:
                self._decide(located, base)
        else:
            self._serve(located)

    def _why_not(self, located: Located, answer: Replacement) -> tuple[str, str] | None:
        """Reason and detail, where a use has a replacement that is not to be written."""
        site = located.site
        if located.path in self._frozen:
            return "unverified", ""
        if site.name in self._patched:
            return "assigned", "the getter is replaced elsewhere"
        if site.kind is Kind.PRIVATE and (
            (unit_of(located.use.scope), located.path) in self._writing
        ):
            return "assigned", "its function writes variables of the module and reads them back"
        if not site.exact or (site.in_fstring and not self._fits_in_string(located)):
            return "in-a-string", ""
        if unit_of(located.use.scope) is None and _answers_zero(site.name):
            return "at-import", ""
        if "#" in site.text and "\n" in site.text:
            return "comment-inside", ""
        if answer.caution and not self._unsafe:
            return answer.caution, "--unsafe rewrites it"
        return None

    def _fits_in_string(self, located: Located) -> bool:
        looked = self._index.look(located.path)
        if looked is None or is_shown(looked[0], located.use.parents):
            return False
        quoted = '"' in located.site.replacement
        return not quoted or quote_in(looked[0], located.begin, located.use.parents) is not None

    def _serve(self, located: Located) -> None:
        unit = unit_of(located.use.scope)
        if self._is_tainted(unit):
            self._decide(located, _GLOBALS)
            return
        base = _best(located.site.carriers)
        if base is not None and base.made_here:
            self._of_locals.append((located, base))
        elif base is not None:
            self._decide(located, base)
            self._give_to_self(located, base)
        elif unit is not None and self._may_take(unit, located.path):
            self._wanting.setdefault(unit, []).append(located)
        elif (constructor := self._held_by_self(located)) is not None:
            self._of_self.append((located, constructor))
        else:
            self._decide(located, _GLOBALS)

    def _decide(self, located: Located, base: Base) -> None:
        answer = located.site.answer
        if isinstance(answer, Replacement):
            self._plan.decisions.append(Decision(located, answer, base))

    def _may_take(self, function: Scope, path: Path) -> bool:
        if path in self._frozen or not self._functions.can_take(function, path):
            return False
        self._paths[function] = path
        return True

    def _held_by_self(self, located: Located) -> Scope | None:
        """The constructor that can put the collection on ``self``, where a method asks."""
        method = unit_of(located.use.scope)
        constructor = self._constructor(method, located.path) if method is not None else None
        if constructor is None:
            constructor = self._kept_by_base(located.use, located.path)
            if constructor is not None:
                self._wanting.setdefault(constructor, [])
        else:
            self._wanting.setdefault(constructor, [])
            if isinstance(located.site.answer, Replacement):
                self._of_methods.setdefault(constructor, set()).update(located.site.answer.needs)
        return constructor

    def _give_to_self(self, located: Located, base: Base) -> None:
        """Let the constructor of a model's class take what its methods look for on ``self``."""
        method = unit_of(located.use.scope)
        if method is not None and base.how is How.MODEL and base.expression == _self_of(method):
            self._held_by_self(located)

    def _kept_by_base(self, use: Use, path: Path) -> Scope | None:
        """The constructor of the base that keeps the collection, where one with ``**kwargs``, which
        hands these on to it, has done so.
        """
        constructor = unit_of(use.scope)
        klass = class_of(constructor) if constructor is not None else None
        base = self._only_base(klass, path) if klass is not None else None
        for _ in range(_DEEPEST):
            if base is not None and "__init__" not in base[0].bindings:
                base = self._only_base(*base)
        if constructor is None or base is None or has_another_role(constructor):
            return None
        around = statements_around(use.parents, constructor.node)
        if not any(
            runs_before(statement, around, constructor.node)
            for statement in kept_behind(constructor) or ()
            if _hands_on(statement, constructor)
        ):
            return None
        for each in base[0].bindings.get("__init__", ()):
            if isinstance(each, Defined):
                return self._constructor(each.scope, base[1])
        return None

    def _only_base(self, klass: Scope, path: Path) -> tuple[Scope, Path] | None:
        """The class of the project of which alone a class is made."""
        bases: list[ast.expr] = getattr(klass.node, "bases", [])
        if len(bases) != 1 or klass.parent is None:
            return None
        things = self._index.resolver.expression(bases[0], klass.parent, path)
        thing = next(iter(things)) if len(things) == 1 else None
        if thing is None or thing.kind != "class" or thing.scope is None or thing.path is None:
            return None
        return thing.scope, thing.path

    def _constructor(self, method: Scope, path: Path) -> Scope | None:
        """The constructor that can keep a collection for a method."""
        if has_another_role(method):
            return None
        if not _self_of(method) or not _is_usual_method(method) or method.parent is None:
            return None
        for each in method.parent.bindings.get("__init__", ()):
            if (
                isinstance(each, Defined)
                and self._keeps(each.scope, path)
                and self._may_take(each.scope, path)
            ):
                return each.scope
        return None

    # -- fakes -------------------------------------------------------------------------------

    def _is_tainted(self, unit: Scope | None) -> bool:
        return unit is not None and unit in self._tainted

    def _reached_by_fakes(self) -> set[Scope]:
        """Functions that fake a rank or a size, those that are decorated with one or handed to it,
        and those that they call: only the globals know what was faked.
        """
        found: dict[Scope, Path] = {}
        for located in self._index.located:
            site, unit = located.site, unit_of(located.use.scope)
            fakes = site.reason in _FAKING and (
                site.name.startswith(("set_", "_MPU_")) or site.kind is Kind.ASSIGNED
            )
            if fakes and unit is not None:
                found[unit] = located.path
        for unit, path in list(found.items()):
            found.update(self._handed_to(unit, path))
        waiting = list(found.items())
        while waiting:
            unit, path = waiting.pop()
            for callee, at in self._called_by(unit, path):
                if callee not in found:
                    found[callee] = at
                    waiting.append((callee, at))
        return set(found)

    def _owning_groups(self) -> set[Scope]:
        """Functions that make or end the groups themselves: what they read is what they made, and
        a model that they have may carry groups of before.
        """
        units = {
            unit_of(located.use.scope)
            for located in self._index.located
            if located.site.kind is Kind.CALL and located.site.name in _OWNING
        }
        return {unit for unit in units if unit is not None}

    def _makes_groups(self, unit: Scope | None, path: Path) -> bool:
        """Whether a function calls one that makes the groups, be it by way of others. Whether there
        are any it asks of the globals then: it makes them where they have none.
        """
        found = {unit: path} if unit is not None else {}
        for _ in range(_DEEPEST):
            if not self._owning.isdisjoint(found):
                return True
            for each, at in list(found.items()):
                found.update(self._called_by(each, at))
        return False

    def _handed_to(self, function: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        """The functions that a function is to call: it decorates them, or is passed them."""
        for reference in self._functions.references(function, path):
            use, at = reference.use, reference.path
            outer = use.parents.node
            if isinstance(outer, ast.Call) and outer.func is reference.node:
                for each in outer.args:
                    for thing in self._index.resolver.expression(each, use.scope, at):
                        if thing.kind == "function" and thing.scope and thing.path:
                            yield thing.scope, thing.path
                outer = use.parents.above.node if use.parents.above else outer
            if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
                named = (e.func if isinstance(e, ast.Call) else e for e in outer.decorator_list)
                if any(each is reference.node for each in named):
                    for binding in use.scope.bindings.get(outer.name, ()):
                        if isinstance(binding, Defined) and binding.scope.node is outer:
                            yield binding.scope, at

    def _called_by(self, unit: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        analysis = self._index.analysis(path)
        for use in analysis.uses if analysis else ():
            parent = use.parents.node
            if not isinstance(parent, ast.Call) or parent.func is not use.node:
                continue
            if unit_of(use.scope) is not unit:
                continue
            for thing in self._index.resolver.expression(use.node, use.scope, path):
                if thing.scope is None or thing.path is None:
                    continue
                if thing.kind == "function":
                    yield thing.scope, thing.path
                elif thing.kind == "class":
                    for binding in thing.scope.bindings.get("__init__", ()):
                        if isinstance(binding, Defined):
                            yield binding.scope, thing.path

    # -- threading ---------------------------------------------------------------------------

    def _thread(self) -> dict[Scope, None]:
        """The functions that get the parameter: those that want it, and those between them and
        a caller that has something to pass.
        """
        reached: dict[Scope, int] = dict.fromkeys(self._wanting, 0)
        waiting = list(reached)
        while waiting:
            function = waiting.pop(0)
            edges = self._edges[function] = list(self._callers(function))
            for edge in edges:
                caller, depth = edge.caller or edge.keeper, reached[function] + 1
                if caller is not None and caller not in reached and depth <= _DEEPEST:
                    reached[caller] = depth
                    waiting.append(caller)
        useful = {
            function
            for function in reached
            if (function in self._wanting and not self._has_its_own(function))
            or any(edge.caller is None for edge in self._edges[function])
        }
        while True:
            more = {
                function
                for function in reached
                if function not in useful
                and any(edge.caller in useful for edge in self._edges[function])
            }
            if not more:
                break
            useful |= more
        return {function: None for function in reached if function in useful}

    def _has_its_own(self, function: Scope) -> bool:
        """Whether a function takes groups as it is, turns to the globals where it was passed none
        only, and nobody in the project who calls it so has a collection.
        """
        sites = self._wanting[function]
        if self._edges[function] or not sites or class_of(function) is not None:
            return False
        return all(_stands_in(located, function) for located in sites)

    def _callers(self, function: Scope) -> Iterator[_Edge]:
        for reference in self._functions.references(function, self._paths[function]):
            call, path = reference.call, reference.path
            calls = calls_by_another_name(reference) if call is None else [call]
            if not calls or path in self._frozen:
                continue
            keywords = [keyword.arg for each in calls for keyword in each.keywords]
            # Who passes a group passes what is needed: a collection would be looked up in vain.
            if any(k is None or k == PARAMETER or k in GROUP_PARAMETERS for k in keywords):
                continue
            if any(isinstance(each, ast.JoinedStr) for each in reference.use.parents):
                continue
            looked = self._index.look(path)
            if looked is None or (call and not add_argument(looked[0], call, [PARAMETER])):
                continue
            unit = unit_of(reference.use.scope)
            if self._is_tainted(unit):
                continue
            supply = _best(carriers(reference.use, path, None, self._index.resolver))
            if supply is not None:
                if call is not None or not _is_rebound(supply, reference.use.scope):
                    yield _Edge(reference, supply, None, self._keeper(unit, path, supply))
            elif unit is not None and self._may_take(unit, path):
                yield _Edge(reference, Base(How.THREADED, "plain", PARAMETER), unit)
            elif unit is not None and (
                constructor := self._constructor(unit, path)
                or self._kept_by_base(reference.use, path)
            ):
                yield _Edge(reference, Base(How.THREADED, "groups_of", _self_of(unit)), constructor)

    def _keeper(self, unit: Scope | None, path: Path, supply: Base) -> Scope | None:
        """A constructor that passes what its object carries: what it is passed comes first."""
        if unit is None or class_of(unit) is None or supply.expression != _self_of(unit):
            return None
        return self._constructor(unit, path)

    def _fed(self, taking: Collection[Scope]) -> set[Scope]:
        """The functions to which every caller in the project passes a collection."""
        fed = set(taking)
        while True:
            hungry = {each for each in fed if not self._is_fed(each, fed)}
            if not hungry:
                return fed
            fed -= hungry

    def _is_fed(self, function: Scope, fed: Collection[Scope]) -> bool:
        edges = {id(edge.reference): edge for edge in self._edges[function]}
        references = self._functions.references(function, self._paths[function])
        for reference in references:
            edge = edges.get(id(reference))
            if edge is None:
                return False
            if edge.supply.optional or (edge.caller is not None and edge.caller not in fed):
                return False
        return bool(references) and self._functions.all_seen(function)

    def _looked_up_at(self, function: Scope, taking: Collection[Scope]) -> ast.stmt | None:
        """Where a function that is to be given groups, and no collection, would look up those
        that it was not passed; None where it is to be given a collection.
        """
        sites = self._wanting.get(function, ())
        if self._style is Style.COLLECTION or not sites or class_of(function) is not None:
            return None
        if any(edge.caller is function for each in taking for edge in self._edges.get(each, ())):
            return None
        if any(edge.reference.call is None for edge in self._edges.get(function, ())):
            return None  # groups would be looked up before it is called, if it is
        if any(unit_of(located.use.scope) is function for located, _ in self._optional):
            return None  # whether there are groups at all is asked of a collection
        fields = set()
        for located in sites:
            answer = located.site.answer
            if not isinstance(answer, Replacement) or answer.write_narrow("group") is None:
                return None
            fields.add(answer.field)
        if len(fields) > (1 if self._style is Style.AUTO else _MOST_GROUPS):
            return None
        if any(mentions(function, group_name(field)) for field in fields):
            return None
        first = first_read(function.node, [located.use for located in sites])
        body = getattr(function.node, "body", [])
        if first is None or not any(first is each for each in body):
            return None
        looked = self._index.look(self._paths[function])
        if looked is None or add_statement(looked[0], first, "pass") is None:
            return None  # it stands on the line of another one
        before = body[: next(i for i, each in enumerate(body) if each is first)]
        # What comes before may not end the function: then nobody would have asked for the group.
        ordinary = all(isinstance(each, ast.Assign | ast.AnnAssign | ast.Expr) for each in before)
        return first if ordinary else None

    def _keeps(self, function: Scope, path: Path) -> bool:
        klass = class_of(function)
        return klass is not None and not self._functions.is_of_core(klass, path)

    def _kept_behind(
        self, function: Scope, path: Path, taking: Collection[Scope]
    ) -> tuple[ast.stmt, ...]:
        """The calls behind which a constructor has to keep what it was passed; none where all of
        them pass it on, or there is no other constructor that keeps something.
        """
        klass = class_of(function)
        if klass is None or not self._keeps(function, path):
            return ()
        others = [
            each.scope
            for above in ancestry(klass, path, self._index.resolver)
            if isinstance(above, Scope) and above is not klass
            for each in above.bindings.get("__init__", ())
            if isinstance(each, Defined) and each.scope in taking
        ]
        same = (PARAMETER, _self_of(function))
        passed = {
            id(edge.reference.call)
            for other in others
            for edge in self._edges.get(other, ())
            if _is_passed_first(edge, taking)
            or (edge.supply.expression in same and (edge.caller is None or edge.caller in taking))
        }
        if not others or all(id(call) in passed for call in calls_of_bases(function)):
            return ()
        return tuple(kept_behind(function) or ())

    def _needs_of(self, taking: Collection[Scope]) -> Mapping[Scope, tuple[str, ...]]:
        """The fields that are read in each function and behind it."""
        needs = {each: set(self._of_methods.get(each, ())) for each in taking}
        for function, sites in self._wanting.items():
            for located in sites if function in needs else ():
                if isinstance(located.site.answer, Replacement):
                    needs[function] |= set(located.site.answer.needs)
        changed = True
        while changed:
            changed = False
            for function in taking:
                for edge in self._edges.get(function, ()):
                    caller = edge.caller or edge.keeper or _constructor_around(edge)
                    unit = unit_of(edge.reference.use.scope)
                    if caller is None or unit is None or caller.parent is not unit.parent:
                        continue  # a base is not asked for what only some classes made of it read
                    if caller in needs and not needs[function] <= needs[caller]:
                        needs[caller] |= needs[function]
                        changed = True
        return {function: tuple(sorted(fields)) for function, fields in needs.items()}


def _constructor_around(edge: _Edge) -> Scope | None:
    """The constructor that calls that of its base, which keeps on the same object what it gets."""
    if not isinstance(edge.reference.node, ast.Attribute) or edge.reference.call is None:
        return None
    unit = unit_of(edge.reference.use.scope)
    is_base_s = edge.reference.node.attr == "__init__"
    return unit if is_base_s and unit is not None and class_of(unit) is not None else None


def _is_passed_first(edge: _Edge, taking: Collection[Scope]) -> bool:
    """Whether a constructor hands what it was passed to its base, before what it finds itself."""
    return not (edge.caller or edge.keeper) and _constructor_around(edge) in taking


def _is_replaced(located: Located) -> bool:
    """Whether a site puts something in the place of a getter, for good."""
    if located.site.kind is not Kind.PATCHED:
        return located.site.kind is Kind.ASSIGNED
    call = located.node
    return (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "setattr"
    )


def _stands_in(located: Located, function: Scope) -> bool:
    """Whether a use is what a function takes where a parameter of its own, for a group, is None."""
    answer = located.site.answer
    if located.use.scope is not function or not isinstance(answer, Replacement):
        return False
    around = statements_around(located.use.parents, function.node)
    return any(
        isinstance(bound[0], Opaque)
        and bound[0].parameter
        and (name in _ANY_GROUP or answer.field in GROUP_PARAMETERS.get(name, ()))
        and is_ruled_out(name, around, function.node)
        for name, bound in function.bindings.items()
    )


def _writes_a_variable(site: Site) -> bool:
    """Whether a site puts something into a private variable of the globals, be it whatever."""
    if site.kind not in (Kind.ASSIGNED, Kind.PATCHED, Kind.STRING):
        return False
    return site.name.startswith("_") or (site.kind is Kind.PATCHED and not site.name)


def _answers_zero(name: str) -> bool:
    """Whether a getter gives 0 where torch.distributed is not initialised, and does not fail."""
    if not name.endswith(("_rank", "_world_size")) or name.endswith("_src_rank"):
        return False
    return not name.startswith(("get_tensor_model_parallel", "get_pipeline", "get_virtual"))


def group_name(field: str) -> str:
    """What the parameter for a field's group is called."""
    return f"{field}_group"


def _parameter(fed: bool) -> Base:
    return Base(How.THREADED if fed else How.RESOLVED, "resolve", PARAMETER)


def _best(found: Sequence[Carrier]) -> Base | None:
    for carrier in found:
        if not carrier.certain:
            continue
        if carrier.kind == "group":
            return Base(How.GROUP, "group", carrier.expression)
        if carrier.kind == "collection" and carrier.may_be_none:
            return Base(How.RESOLVED, "of_collection", carrier.expression, optional=True)
        how = How.COLLECTION if carrier.kind == "collection" else How.MODEL
        expression = carrier.expression
        if carrier.kind == "collection" and carrier.origin == "attribute":
            # It may have some of the fields only; groups_of() of its owner looks further then.
            expression = expression.rpartition(".")[0]
        elif carrier.kind == "collection":
            return Base(how, "of_collection", expression)
        made_here = carrier.kind == "model" and carrier.origin == "local"
        return Base(how, "groups_of", expression, made_here=made_here)
    return None


def _is_rebound(supply: Base, function: Scope) -> bool:
    """Whether it may be another one when something is called than when that was given a name."""
    found = function.find(supply.expression.partition(".")[0])
    return found is not None and len(found[1]) > 1


def _self_of(method: Scope | None) -> str:
    """What a method calls its instance; empty where there is none."""
    for name, bindings in method.bindings.items() if method is not None else ():
        if any(isinstance(each, Instance) for each in bindings):
            return name
    return ""


def _hands_on(statement: ast.stmt, constructor: Scope) -> bool:
    """Whether a statement is ``super().__init__`` with the ``**kwargs`` of the constructor."""
    call, arguments = getattr(statement, "value", None), getattr(constructor.node, "args", None)
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and is_super(call.func.value, constructor)
        and isinstance(arguments, ast.arguments)
        and arguments.kwarg is not None
        and any(
            each.arg is None
            and isinstance(each.value, ast.Name)
            and each.value.id == arguments.kwarg.arg
            for each in call.keywords
        )
    )


def _is_usual_method(method: Scope) -> bool:
    special = method.name.startswith("__") and method.name not in ("__call__", "__init__")
    return not special and not decorators(method.node) & {"classmethod", "staticmethod"}
