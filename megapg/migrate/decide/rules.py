"""The rules: from where each use is to be served, or why it is left.

Best first: a collection in scope, a model that carries one, a parameter threaded from callers that
have one of these, and last ``megapg.resolve()``, which takes what was passed, else the globals.
Each is chosen only where it gives what the getter would have given.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from megapg.migrate.decide.alike import have_answered_alike, stands_in
from megapg.migrate.decide.decisions import GLOBALS, Base, Decision, Passing, Plan, Taking, best
from megapg.migrate.decide.facts import Facts, FallenBack
from megapg.migrate.decide.functions import PARAMETER, Functions
from megapg.migrate.decide.handing import handed_on, handed_to
from megapg.migrate.decide.noticed import heard_as, stand_ins, with_what_is_unheard
from megapg.migrate.decide.own import ask_what_is_kept
from megapg.migrate.decide.passed import all_fed, ask_the_object, fields_read, globals_passed
from megapg.migrate.decide.references import Reference
from megapg.migrate.decide.roots import Roots
from megapg.migrate.decide.starts import starts
from megapg.migrate.decide.swallowed import without_what_is_swallowed
from megapg.migrate.decide.threads import Threads, is_usual_method
from megapg.migrate.decide.unpassed import passed_to_nobody
from megapg.migrate.find.axes import asked_about, group_argument, takes_group
from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.meaning import is_in_core
from megapg.migrate.find.sites import Kind, Site
from megapg.migrate.migration import How, Left
from megapg.migrate.python.locate import is_shown, quote_in
from megapg.migrate.python.methods import class_of, self_of, set_up_behind
from megapg.migrate.python.scopes import Scope
from megapg.migrate.reasons import FALLBACK
from megapg.upstream.mapping import COLLECTION_NAMES, Refusal, Replacement, Takes


def make_plan(
    index: Index,
    functions: Functions,
    frozen: Collection[Path] = (),
    fallen: FallenBack | None = None,
    *,
    unsafe: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Decide about every site of an index.

    Args:
        index: the project.
        functions: of the same index.
        frozen: files that must stay as they are.
        fallen: functions that fall back, as the check of an earlier plan's result found.
        unsafe: also rewrite what may behave differently where groups are missing.
        on_progress: called with the number of sites done and to do.
    """
    facts = Facts(index, functions.references, fallen or FallenBack())
    facts.handed |= handed_to(facts, Threads(index, functions, facts, frozen), functions)
    while True:  # what the globals come to serve as well may be beside something else
        planner = _Planner(index, frozen, unsafe, functions, facts)
        for done, located in enumerate(index.located):
            on_progress(done, len(index.located))
            planner.look_at(located)
        plan = planner.plan()
        if not have_answered_alike(plan, index, facts, functions.references):
            return without_what_is_swallowed(ask_what_is_kept(plan, index))


# -- the rules -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One question about a use that has a replacement, and what follows where the answer is yes."""

    says: str  # what is so then; ``megapg explain FILE:LINE`` prints it
    applies: Callable[[_Planner, Located], bool]  # whether it is so
    then: Callable[[_Planner, Located], None]  # what is decided


def _left(code: str, detail: str = "") -> Callable[[_Planner, Located], None]:
    """The use is left, for a reason of :data:`megapg.migrate.reasons.REASONS`; without a code, for
    the caution of its replacement.
    """

    def leave(planner: _Planner, located: Located) -> None:
        code_of_caution = getattr(located.site.answer, "caution", "")
        left = Left(located.site, code or code_of_caution, detail, located.site.replacement)
        planner.result.left.append(left)

    return leave


def _takes(located: Located) -> Takes:
    answer = located.site.answer
    return answer.takes if isinstance(answer, Replacement) else Takes.COLLECTION


def _is_read_back(planner: _Planner, located: Located) -> bool:
    return located.site.kind is Kind.PRIVATE and planner.facts.written_at(located) is not None


def _left_as_assigned(
    what: str, where: Callable[[Facts, Located], Site | None]
) -> Callable[[_Planner, Located], None]:
    """The use is left, since something is written to the module; that is said with the place."""

    def leave(planner: _Planner, located: Located) -> None:
        site = where(planner.facts, located)
        detail = f"{what}, at {site.file}:{site.span.line}" if site is not None else what
        _left("assigned", detail)(planner, located)

    return leave


def _is_fallback(located: Located) -> bool:
    use = located.use  # a function further in may run later
    return use.scope is use.scope.unit and stands_in(use, COLLECTION_NAMES)


def _does_not_fit(planner: _Planner, located: Located) -> bool:
    looked = planner.index.look(located.path)
    if not located.site.exact:
        return True
    if not located.site.in_fstring:
        return False
    if looked is None or is_shown(looked[0], located.use.parents):
        return True
    quoted = '"' in located.site.replacement
    return quoted and quote_in(looked[0], located.begin, located.use.parents) is None


def _answers_zero_at_import(planner: _Planner, located: Located) -> bool:
    """Before torch.distributed is initialised some getters give 0, and others fail."""
    name = located.site.name
    if located.use.scope.unit is not None or name.endswith("_src_rank"):
        return False
    fails = ("get_tensor_model_parallel", "get_pipeline", "get_virtual")
    return name.endswith(("_rank", "_world_size")) and not name.startswith(fails)


def _has_caution(planner: _Planner, located: Located) -> bool:
    return bool(getattr(located.site.answer, "caution", "")) and not planner.unsafe


def _is_unsound(planner: _Planner, located: Located) -> bool:
    return located.path in planner.frozen or located.use.scope.unit in planner.facts.fallen.left


def _unverified(planner: _Planner, located: Located) -> None:
    unit, fallen = located.use.scope.unit, planner.facts.fallen
    _left("unverified", fallen.why[unit] if unit in fallen.left else "")(planner, located)


def _is_parted(planner: _Planner, located: Located) -> bool:
    unit, asked = located.use.scope.unit, asked_about(located.site)
    axes = planner.facts.parted.get(unit) if unit is not None else None
    return axes is not None and (not asked or not axes.isdisjoint(asked))


def _tests_what_it_made(planner: _Planner, located: Located) -> bool:
    unit, path = located.use.scope.unit, located.path
    if unit is None or not planner.index.modules.is_test(path):
        return False
    klass = unit.parent if unit.parent is not None and unit.parent.kind == "class" else None
    beside = klass.defined("setup_method") + klass.defined("setUp") if klass else []
    return any(planner.facts.makes_groups(each, path) for each in (unit, *beside))


def _by_what_is_just_passed(planner: _Planner, located: Located) -> None:
    (_by_what_is_passed if _may_be_passed(planner, located) else _by_globals)(planner, located)


def _by_globals(planner: _Planner, located: Located) -> None:
    planner.decide(located, GLOBALS)


def _by_what_there_is(planner: _Planner, located: Located) -> None:
    base, unit, path = planner.best(located), located.use.scope.unit, located.path
    is_guard = _takes(located) is Takes.OPTIONAL and planner.facts.makes_groups(unit, path)
    if base is None or base.optional or is_guard or planner.facts.asks_globals(base, unit, path):
        planner.optional.append(located)
    else:
        planner.decide(located, base)


def _is_at_hand(planner: _Planner, located: Located) -> bool:
    return planner.best(located) is not None


def _by_what_is_at_hand(planner: _Planner, located: Located) -> None:
    base = planner.best(located)
    assert base is not None  # that was asked
    if base.made_here:
        planner.of_locals.append((located, base))
        return
    planner.decide(located, base)
    if base.how is How.MODEL and base.expression == self_of(located.use.scope.unit):
        planner.threads.held_by_self(located)  # the constructor may take what it looks for
        planner.threads.complete(located.use.scope.unit, located.path)


def _may_be_passed(planner: _Planner, located: Located) -> bool:
    unit = located.use.scope.unit
    return unit is not None and planner.threads.may_take(unit, located.path)


def _by_what_is_passed(planner: _Planner, located: Located) -> None:
    unit = located.use.scope.unit
    assert unit is not None  # that was asked
    planner.threads.wanting.setdefault(unit, []).append(located)


def _may_be_kept(planner: _Planner, located: Located) -> bool:
    constructor = planner.threads.held_by_self(located)
    if constructor is not None:
        planner.of_self.append((located, constructor))
    return constructor is not None


_REPLACED = "the getter is replaced elsewhere"
_READ_BACK = "its function writes variables of the module and reads them back"

RULES = (
    Rule(
        "the rewrite of its file, or of its function, was found unsound", _is_unsound, _unverified
    ),
    Rule(
        _REPLACED,
        lambda planner, located: planner.facts.replaced_at(located) is not None,
        _left_as_assigned(_REPLACED, Facts.replaced_at),
    ),
    Rule(_READ_BACK, _is_read_back, _left_as_assigned(_READ_BACK, Facts.written_at)),
    Rule(
        "its branch is the one for where the collection at hand is None: the globals are meant",
        lambda planner, located: _is_fallback(located),
        _left(FALLBACK),
    ),
    Rule(
        "it is in an f-string in which the replacement can't stand",
        _does_not_fit,
        _left("in-a-string"),
    ),
    Rule(
        "it is called at import, and gives 0 there without failing",
        _answers_zero_at_import,
        _left("at-import"),
    ),
    Rule(
        "a comment is inside of it",
        lambda planner, located: "#" in located.site.text and "\n" in located.site.text,
        _left("comment-inside"),
    ),
    Rule(
        "the replacement may behave differently where groups are missing",
        _has_caution,
        _left("", "--unsafe rewrites it"),
    ),
    Rule(
        "it is a test that has the groups made, and has nothing else at hand: it means these",
        lambda planner, located: _tests_what_it_made(planner, located),
        _left("lifecycle", "a test of the groups that it has Megatron make"),
    ),
    Rule(
        "it asks for state of the job that no group tells: the globals serve",
        lambda planner, located: _takes(located) is Takes.GLOBALS,
        _by_globals,
    ),
    Rule(
        "it asks whether there are groups: what was passed serves, None included, or what is at "
        "hand; else Megatron's call stays",
        lambda planner, located: _takes(located) in (Takes.OPTIONAL, Takes.LAZY),
        _by_what_there_is,
    ),
    Rule(
        "its function has the groups made, or ended: it means these",
        lambda planner, located: located.use.scope.unit in planner.facts.owning,
        _left("lifecycle", "about the groups that its function makes or ends"),
    ),
    Rule(
        "its function fakes ranks, is a method that is called by what does, or has the groups of "
        "the globals exchanged: the globals serve",
        lambda planner, located: planner.facts.is_closed(located.use.scope.unit),
        _by_globals,
    ),
    Rule(
        "its function, or its class, asks the globals about the same kind of groups: they serve",
        _is_parted,
        _by_globals,
    ),
    Rule(
        "its function is called by one that fakes ranks: what is passed serves, else the globals",
        lambda planner, located: located.use.scope.unit in planner.facts.passable,
        _by_what_is_just_passed,
    ),
    Rule(
        "a collection or a model is at hand, and serves; one that the function makes does where "
        "nothing is passed",
        _is_at_hand,
        _by_what_is_at_hand,
    ),
    Rule(
        f"its function can take {PARAMETER}, which serves where a caller can pass it",
        _may_be_passed,
        _by_what_is_passed,
    ),
    Rule(
        f"the constructor of its class, or forward beside it, can take {PARAMETER} and keep it",
        _may_be_kept,
        lambda planner, located: None,  # it waits already
    ),
    Rule("nothing else: the globals serve", lambda planner, located: True, _by_globals),
)
"""For uses that have a replacement: the first that applies decides."""


class _Planner:
    """Decides what serves each use.

    What methods find on ``self``, and what may be None, depends on which functions get the
    parameter: these uses wait until that is known.
    """

    def __init__(
        self,
        index: Index,
        frozen: Collection[Path],
        unsafe: bool,
        functions: Functions,
        facts: Facts,
    ) -> None:
        self.index: Index = index
        self.frozen, self.unsafe = frozen, unsafe
        self.functions: Functions = functions
        self.facts: Facts = facts
        self.threads: Threads = Threads(index, self.functions, self.facts, frozen)
        self.result = Plan(facts.renewals.lines)
        self.optional: list[Located] = []
        self.of_self: list[tuple[Located, Scope]] = []
        self.of_locals: list[tuple[Located, Base]] = []

    def best(self, located: Located) -> Base | None:
        """What serves a use as it is, where anything does."""
        return self.facts.best(located.site.carriers, located.use, located.path)

    def look_at(self, located: Located) -> None:
        """Decide about a use, as far as that depends on no other one."""
        site, answer = located.site, located.site.answer
        if site.keep:
            return
        if isinstance(answer, Refusal):
            heard = heard_as(located, self.index)
            self.result.left.append(Left(site, answer.reason, answer.detail, heard))
        else:
            number, rule = next(e for e in enumerate(RULES) if e[1].applies(self, located))
            rule.then(self, located)
            self.result.decided_by.append((site, number))

    def decide(self, located: Located, base: Base) -> None:
        """Have a use served."""
        answer = located.site.answer
        if isinstance(answer, Replacement):
            self.result.decisions.append(Decision(located, answer, base))

    def plan(self) -> Plan:
        """Decide about the uses that wait for others."""
        threads = self.threads
        for located, base in self.of_locals:
            unit = located.use.scope.unit
            if unit is not None and unit in threads.wanting:
                threads.wanting[unit].append(located)  # what was passed is asked first
            else:
                self.decide(located, base)
        taking = threads.thread()
        fed = all_fed(threads, self.functions, taking)
        self.result.unpassed = passed_to_nobody(threads, taking, self.index)

        def how(function: Scope | None) -> How:
            return How.THREADED if function in fed else How.RESOLVED

        for function, sites in threads.wanting.items():
            takes = function in taking
            base = Base(how(function), "resolve", PARAMETER) if takes else GLOBALS
            for located in sites:
                self.decide(located, base)
        for located, constructor in self.of_self:
            of = threads.of_object(located.use.scope.unit, located.path, how(constructor))
            self.decide(located, of if class_of(constructor) or constructor in taking else GLOBALS)
        for located in self.optional:
            self._ask_whether(located, taking, how)
        needs = fields_read(threads, taking)
        for function in taking:
            self._take(function, needs[function], taking)
        self._pass_groups(taking, how)
        self.result.passing += globals_passed(
            self.result, self.facts, threads, self.functions, needs
        )
        self.result.passing += list(handed_on(self.result, self.facts, threads, self.index))
        ask_the_object(self.result, self.facts, taking, self.index)
        for each in self.result.passing:
            unit = each.reference.use.scope.unit
            if each.base.how is How.MODEL and each.base.expression == self_of(unit):
                threads.complete(unit, each.reference.path)
        for function, path in threads.completed.items():
            behind = tuple(set_up_behind(function) or ())
            self.result.taking.append(Taking(function, path, True, behind, False, at_first=False))
        kept = [constructor for _, constructor in self.of_self]
        self.result.starts = starts(self.index, self.functions, threads, taking, kept)
        roots = Roots(self.functions, self.facts, threads, taking, fed)
        self.result.whys = roots.whys(self.result.decisions)
        self.result.left[:] = [*with_what_is_unheard(self.result.left, self.result.decisions)]
        return self.result

    def _ask_whether(
        self, located: Located, taking: Collection[Scope], how: Callable[[Scope | None], How]
    ) -> None:
        """Have what asks whether there are groups served by what will be at hand."""
        unit, path = located.use.scope.unit, located.path
        is_whether = _takes(located) is Takes.OPTIONAL
        keeper, is_parted = self.threads.keeper(unit, path), _is_parted(self, located)
        if unit in taking and not is_parted:
            base = Base(how(unit), "plain" if is_whether else "resolve", PARAMETER, optional=True)
        elif is_whether and keeper in taking and not is_parted:
            base = replace(self.threads.of_object(unit, path, how(keeper), "plain"), optional=True)
        elif is_whether and self._may_be_at_hand(located):
            base = replace(best(located.site.carriers) or GLOBALS, form="plain")
        elif is_whether and not is_in_core(path):
            _left("lifecycle", "no collection is at hand: Megatron's call stays")(self, located)
            return
        else:
            form = "plain" if is_whether else "resolve"
            base = Base(how(unit), form, "None", optional=True)
        self.decide(located, base)

    def _may_be_at_hand(self, located: Located) -> bool:
        """Whether a function has a collection of its own, or None, that serves all that it asks."""
        unit, path, base = located.use.scope.unit, located.path, self.best(located)
        if unit is None or base is None or not base.optional:
            return False
        return base.expression in unit.bindings and not (
            self.facts.is_of_globals(unit, path) or self.facts.makes_groups(unit, path)
        )

    def _pass_groups(self, taking: Collection[Scope], how: Callable[[Scope | None], How]) -> None:
        """Have what serves a function serve its calls of Megatron-core that pass no group, too."""
        served: dict[Scope, tuple[Path, Base]] = {}
        seen = set[Scope | None]()  # classes
        for each in self.result.decisions:
            unit, path, base = each.located.use.scope.unit, each.located.path, each.base
            if unit is None or base == GLOBALS or "tp" not in asked_about(each.located.site):
                continue
            served.setdefault(unit, (path, base))
            asks_self = base.expression == self_of(unit) and unit.parent not in seen
            seen |= {unit.parent} if asks_self else set()
            for method in self.facts.beside(unit, path) if asks_self else ():
                if is_usual_method(method) and class_of(method) is None:
                    of_self = replace(base, expression=self_of(method))
                    served.setdefault(method, (path, of_self))
        for unit, (path, base) in served.items():
            if unit in self.facts.tainted or "tp" in self.facts.parted.get(unit, ()):
                continue
            for use in self.facts.without_a_group(unit, path):
                call, argument = use.parents.node, group_argument(use.parents.node)
                found = self.facts.best(self.index.carriers(use, path), use, path)
                if found is None and unit in taking:
                    found = Base(how(unit), "resolve", PARAMETER)
                elif found is None and base.expression == self_of(unit):
                    found = base
                if found is None or argument is None or not isinstance(call, ast.Call):
                    continue
                if takes_group(call, self.index.config.versions) and (
                    not self.facts.is_of_globals_module(use, path)
                ):
                    at = Reference(path, use, call, call.func)
                    passing = Passing(at, path, found, ("tp",), argument.name)
                    self.result.passing.append(passing)

    def _take(self, function: Scope, needs: tuple[str, ...], taking: Collection[Scope]) -> None:
        """Have a function take the parameter, and its callers pass it."""
        threads, path = self.threads, self.threads.paths[function]
        keeps = threads.keeps(function, path) and not threads.is_kept_above(function, path, taking)
        behind = threads.kept_behind(function, path, taking)
        is_first = keeps and not threads.above(function, path, taking)
        of_torch = self.functions.set_up_by(function, path) if is_first else ()
        applied = self.functions.references.autograd.of(function, path)
        taken = Taking(function, path, keeps, behind or of_torch, True, not of_torch, applied)
        self.result.taking.append(taken)
        edges = [
            e for e in threads.edges.get(function, ()) if e.caller is None or e.caller in taking
        ]
        if any(not self.index.modules.is_test(each.reference.path) for each in edges):
            self.result.noticed += stand_ins(taken, self.index, self.functions)
        for edge in edges:
            supply = edge.supply
            if edge.is_passed_first(taking):
                supply = replace(supply, passed_first=True)
            self.result.passing.append(Passing(edge.reference, path, supply, needs))
