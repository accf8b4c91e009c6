"""What has to be answered alike: one thing serves all that a function, or a class, asks about one
kind of group. Where nothing can, the globals do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megapg.migrate.decide.already import read_of_collections
from megapg.migrate.decide.decisions import GLOBALS, Base, Plan
from megapg.migrate.decide.early import is_early_and_late
from megapg.migrate.decide.facts import Facts
from megapg.migrate.decide.functions import PARAMETER
from megapg.migrate.decide.incomplete import ask_nothing_that_lacks_a_group
from megapg.migrate.decide.kept import ask_what_the_constructor_asked
from megapg.migrate.decide.references import References
from megapg.migrate.decide.threads import is_usual_method
from megapg.migrate.find.axes import (
    AXES,
    asked_about,
    axes_of,
    is_argument,
    is_of_a_group,
    named_in,
    takes_group,
)
from megapg.migrate.find.carriers import MODEL_NAMES
from megapg.migrate.find.filled import is_filled
from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry, is_of_its_object, keeps_a_model, keeps_its_model
from megapg.migrate.find.roles import has_another_role
from megapg.migrate.find.sites import Kind
from megapg.migrate.migration import How
from megapg.migrate.python.flow import (
    begins_ruled_out,
    is_ruled_out,
    runs_before,
    statements_around,
)
from megapg.migrate.python.methods import (
    class_of,
    kept,
    making,
    parameters,
    self_of,
    setting_up,
)
from megapg.migrate.python.scopes import Alias, Opaque, Scope, Use
from megapg.migrate.reasons import FALLBACK, UNSERVED
from megapg.upstream.mapping import COLLECTION_NAMES, Takes

# What a variable with a collection, or with a model, is called.
_NAMES = (*COLLECTION_NAMES, *MODEL_NAMES)
# Why a use is left that does not ask the globals about a group which something else may have.
_OF_NO_GROUP = (UNSERVED | {FALLBACK}) - {"no-field"}


@dataclass(frozen=True)
class _Asking:
    """What a function asks somewhere."""

    unit: Scope  # the function
    path: Path  # of its file
    axes: frozenset[str]  # about which kinds of groups
    base: Base | None  # of what; None of the globals, as the use is left
    is_for_want: bool = False  # whether it asks the globals only because nothing was at hand
    hands_on: bool = False  # whether it passes the groups to what it calls
    by_another: bool = False  # whether it is what the function calls that asks

    @property
    def of(self) -> str:
        """The variable that is asked."""
        if self.base is None or self.base.passed_first:
            return PARAMETER
        return self.base.expression.partition(".")[0]


def have_answered_alike(plan: Plan, index: Index, facts: Facts, references: References) -> bool:
    """Say in the facts which functions need another plan, since it serves something otherwise than
    what has to be answered alike; whether there are any.

    Args:
        plan: what is to be done.
        index: the project.
        facts: by which that was planned. The functions that make the groups or fake ranks mean
            these, and nothing beside them does.
    """
    if ask_nothing_that_lacks_a_group(plan, facts):
        return True
    of_functions: dict[Scope, list[_Asking]] = defaultdict(list)
    of_classes: dict[Scope, list[_Asking]] = defaultdict(list)
    paths: dict[Scope, Path] = {}
    asked = list(_all(plan, index))
    asked += [*_by_core(asked, plan, index, facts), *_by_autograd(asked, plan, facts)]
    asked += _by_itself(asked)
    handing = {each.unit for each in asked if each.base is None and each.axes == AXES}
    taking = {each.function for each in plan.taking}
    for asking in asked:
        unit = asking.unit
        if unit in facts.owning:
            continue
        of_globals = unit not in facts.passable or _is_of_globals(asking.base)
        if unit in facts.tainted and of_globals:  # whatever serves beside it
            asking = replace(asking, is_for_want=False)
        elif has_another_role(unit) and unit not in handing:
            # It may ask each of its models. Where it asks the globals, its class does.
            if not _is_of_globals(asking.base):
                continue
            asking = replace(asking, is_for_want=False)
        else:
            of_functions[unit].append(asking)
        of_autograd = references.autograd.of(unit, asking.path) is not None
        counts = of_autograd or _is_of_globals(asking.base) or _is_of_self(asking)
        # A constructor that takes a collection is to use that for everything.
        is_first = class_of(unit) is not None and not asking.hands_on
        counts = counts or (is_first and _takes_one(unit, taking))
        # So is what it makes the object by, and has none to ask.
        asks_another = _makes_objects(unit) and asking.of not in COLLECTION_NAMES
        counts = counts or (asks_another and any(_takes_one(e, taking) for e in _makers(unit)))
        # So is what sets the object up, with a model that it makes.
        sets_up = _sets_up_objects(unit) and not _is_parameter(asking.of, unit)
        counts = counts or (sets_up and any(_takes_one(e, taking) for e in _makers(unit)))
        if counts and unit.parent is not None and unit.parent.kind == "class":
            of_classes[unit.parent].append(asking)
            paths[unit.parent] = asking.path
    of_objects = [
        [asking for each in line for asking in of_classes.get(each, ())]
        for line in _lines(paths, index, references)
    ]
    wanting = {unit for together in of_objects for unit in _wanting(together)} - facts.of_self
    facts.of_self |= wanting
    if wanting or ask_what_the_constructor_asked(plan, index, facts):
        return True
    if _ask_their_objects(asked, taking, facts) or any(
        _have_models_since(of, plan, facts) for of in of_objects
    ):
        return True
    apart = {unit for unit, of in of_functions.items() if _is_apart(of)}
    several = {unit for unit, of in of_functions.items() if _asks_a_variable_too(unit, of)}
    of_one = (apart | several) - facts.of_one - facts.parted.keys()
    facts.of_one |= of_one
    if any(_have_models(of, taking, paths, index, facts) for of in of_objects):
        return True
    more = [each for of in of_objects for each in _of_a_class(of, taking)]
    more += [(unit, axes) for of in of_objects for unit, axes in _beside_another(of)]
    more += [
        (each.unit, each.axes)
        for each in asked
        if _is_of_self(each) and is_early_and_late(each.unit, each.path, taking, index, references)
    ]
    for unit, of in of_functions.items():  # a function falls back as a whole
        if unit in apart or any(_beside_the_globals(of)) or _asks_the_globals_too(of):
            more.append((unit, frozenset[str]().union(*(each.axes for each in of))))
    more = [(unit, axes) for unit, axes in more if unit not in of_one]
    is_new = bool(of_one)
    for unit, axes in more:
        known = facts.parted.get(unit, frozenset())
        facts.parted[unit] = known | axes
        is_new |= not axes <= known
    return is_new


def _by_itself(asked: Sequence[_Asking]) -> Iterator[_Asking]:
    """What the functions that ask something read of a collection before the migration. In a
    constructor that is one object's, be it passed or kept.
    """
    for unit, path in {each.unit: each.path for each in asked}.items():
        for name, axes in read_of_collections(unit) if class_of(unit) is None else ():
            yield _Asking(unit, path, axes, Base(How.COLLECTION, "plain", name))


def _by_core(asked: Sequence[_Asking], plan: Plan, index: Index, facts: Facts) -> Iterator[_Asking]:
    """What Megatron-core asks the globals about, in the functions that ask something and beside
    them. Beside them it does not count where no version of it could be passed a group.
    """
    passed = {id(each.reference.use) for each in plan.passing}
    asking = {each.unit: each.path for each in asked if "tp" in each.axes}
    beside = {each: path for unit, path in asking.items() for each in facts.beside(unit, path)}
    for unit, path in (beside | asking).items():
        left = [use for use in facts.without_a_group(unit, path) if id(use) not in passed]
        if unit not in asking:
            left = [each for each in left if takes_group(each.parents.node, index.config.versions)]
        if left:
            yield _Asking(unit, path, frozenset({"tp"}), None, by_another=True)


def _by_autograd(asked: Sequence[_Asking], plan: Plan, facts: Facts) -> Iterator[_Asking]:
    """What the functions that ask something have asked by the autograd functions that they apply,
    of the globals.
    """
    by_unit: dict[Scope, list[_Asking]] = defaultdict(list)
    for each in asked:
        by_unit[each.unit].append(each)
    taking = {each.function for each in plan.taking}
    passed = {id(each.reference.call) for each in plan.passing if each.reference.is_applied}
    for unit, path in {each.unit: each.path for each in asked}.items():
        reached = facts.asked_by_autograd(unit, path, passed)
        axes = frozenset[str]().union(
            *(
                each.axes
                for one in reached
                for each in by_unit.get(one, ())
                if one in taking or _is_of_globals(each.base)
            )
        )
        if axes:
            yield _Asking(unit, path, axes, None, by_another=True)


def _lines(
    paths: Mapping[Scope, Path], index: Index, references: References
) -> Iterator[list[Scope]]:
    """For each class that asks, or is made of one that does, the classes of which its objects have
    methods.
    """
    waiting = list(paths.items())
    for klass, path in waiting:  # grows
        above = ancestry(klass, path, index.resolver)
        yield [each for each in above if isinstance(each, Scope)]
        below = references.made_of(klass.name, path)
        waiting += [each for each in dict.fromkeys(below) if each not in waiting]


def _wanting(together: list[_Asking]) -> Iterator[Scope]:
    """The methods that can ask the object as well as the others of its methods do."""
    if not any(map(_is_of_self, together)):
        return
    axes = frozenset[str]().union(*(each.axes for each in together if _is_of_self(each)))
    bound = {each.unit for each in together if _is_of_globals(each.base) and not each.is_for_want}
    for each in together:
        can_ask = self_of(each.unit) and is_usual_method(each.unit) and not class_of(each.unit)
        if can_ask and each.is_for_want and each.axes & axes and each.unit not in bound:
            yield each.unit


def _is_apart(together: Sequence[_Asking]) -> bool:
    """Whether two objects are asked about one kind of group."""
    asked = [(each.of, each.axes) for each in together if not _is_of_globals(each.base)]
    return any(
        one != other and axes & others
        for at, (one, axes) in enumerate(asked)
        for other, others in asked[at + 1 :]
    )


def _asks_a_variable_too(unit: Scope, together: Sequence[_Asking]) -> bool:
    """Whether a method asks its object, and elsewhere what a variable of it holds."""
    asked = {each.of for each in together if each.base is not None}
    variables = {
        each for each in asked if any(isinstance(b, Alias) for b in unit.bindings.get(each, ()))
    }
    return self_of(unit) in asked and bool(variables)


def _beside_the_globals(together: list[_Asking]) -> Iterator[tuple[Scope, frozenset[str]]]:
    """The functions that ask an object where the globals are asked about one kind of groups, and
    about which kinds.
    """
    globals_ = frozenset[str]().union(*(e.axes for e in together if _is_of_globals(e.base)))
    for asking in together:
        if asking.axes & globals_ and not _is_of_globals(asking.base):
            # What it does not hand on it has asked of the globals, beside what it asks itself.
            yield asking.unit, AXES if asking.hands_on else asking.axes


def _of_a_class(
    together: list[_Asking], taking: Collection[Scope]
) -> Iterator[tuple[Scope, frozenset[str]]]:
    """The same of the methods of a class. One whose constructor takes a collection uses that for
    all kinds, or for none, in what it does itself or calls of the classes above.
    """
    found = list(_beside_the_globals(together))
    own = [each.unit for each in together if each.unit.parent is together[0].unit.parent]
    said = {name for unit in own for of, name in unit.said if of == self_of(unit)}
    if any(_takes_one(each, taking) for unit in own for each in _makers(unit)) and any(
        unit in own or unit.name in said for unit, _ in found
    ):
        found += [(each.unit, AXES) for each in together if not _is_of_globals(each.base)]
    yield from found


def _takes_one(constructor: Scope, taking: Collection[Scope]) -> bool:
    """Whether a constructor takes a collection, as it is or after the migration."""
    arguments = parameters(constructor.node)
    return constructor in taking or any(each.arg in COLLECTION_NAMES for each in arguments)


def _makers(method: Scope) -> list[Scope]:
    """The constructors of the class of a method."""
    klass = method.parent
    return klass.defined("__init__") if klass is not None and klass.kind == "class" else []


def _makes_objects(method: Scope) -> bool:
    """Whether a constructor makes its object by a method that has none."""
    klass = method.parent
    return klass is not None and klass.kind == "class" and method.name in making(klass.node)


def _sets_up_objects(method: Scope) -> bool:
    """Whether a constructor calls a method of its object."""
    klass = method.parent
    return klass is not None and klass.kind == "class" and method.name in setting_up(klass.node)


def _is_parameter(name: str, function: Scope) -> bool:
    first, *_ = function.bindings.get(name, (None,))
    return isinstance(first, Opaque) and first.parameter


def _ask_their_objects(asked: Sequence[_Asking], taking: Collection[Scope], facts: Facts) -> bool:
    """Have methods ask their object, in place of its model that a variable holds, where it may have
    been passed a collection; whether there are any.
    """
    found = {
        unit
        for unit, of in {(each.unit, each.of) for each in asked}
        if any(_takes_one(each, taking) for each in _makers(unit))
        and is_of_its_object(of, unit)
        and not has_another_role(unit)
    } - facts.of_self
    facts.of_self |= found
    facts.of_one |= found
    return bool(found)


def _have_models_since(together: list[_Asking], plan: Plan, facts: Facts) -> bool:
    """Have methods ask their object that set it up, and ask a model that they make, where it has
    one by then; whether there are any.
    """
    apart = {unit for unit, _ in _beside_another(together)} - facts.of_self
    found = {
        e.unit for e in together if e.unit in apart and e.base is not None and not _is_of_self(e)
    }
    if not found:
        return False
    asking = [(each.located.use, each.base) for each in plan.decisions]
    asking += [(each.reference.use, each.base) for each in plan.passing]
    for unit in list(found):
        keeping = [each for each in unit.nodes if keeps_a_model(each, unit)]
        for use, base in asking if _sets_up_objects(unit) and keeping else ():
            if use.scope.unit is unit and base.expression != self_of(unit):
                around = statements_around(use.parents, unit.node)
                if not any(runs_before(each, around, unit.node) for each in keeping):
                    found.discard(unit)
        if not _sets_up_objects(unit) or not keeping:
            found.discard(unit)
    facts.of_self |= found
    facts.of_one |= found
    return bool(found)


def _have_models(
    together: list[_Asking],
    taking: Collection[Scope],
    paths: Mapping[Scope, Path],
    index: Index,
    facts: Facts,
) -> bool:
    """Say in the facts which constructors that get the parameter may ask their object: it has the
    model that they ask; whether there are any. Where what has no object asks the model, they get no
    parameter.
    """
    apart = {unit for unit, _ in _beside_another(together)}
    others = {e.unit for e in together if e.unit in apart and e.base and not _is_of_self(e)}
    more: set[Scope] = set()
    for unit in others - facts.of_passed:
        klass = unit.parent
        if klass is None or klass not in paths:
            continue
        above = ancestry(klass, paths[klass], index.resolver)
        classes = [each for each in above if isinstance(each, Scope)]
        if keeps_its_model(classes) is None:
            continue
        if unit in taking:
            facts.of_passed.add(unit)
            return True
        if _makes_objects(unit):
            more |= {e for each in classes for e in each.defined("__init__") if e in taking}
    more -= facts.of_models
    facts.of_models |= more
    return bool(more)


def _beside_another(together: list[_Asking]) -> Iterator[tuple[Scope, frozenset[str]]]:
    """Those that ask a class's objects, and its constructors that ask another one, about one kind
    of groups.
    """
    own = [each for each in together if _is_of_self(each)]
    others = [e for e in together if not _is_of_globals(e.base) and not _is_of_self(e)]
    both = _of(own) & _of(others)
    yield from ((each.unit, both) for each in own + others if each.axes & both)


def _of(asked: Sequence[_Asking]) -> frozenset[str]:
    return frozenset[str]().union(*(each.axes for each in asked))


def _asks_the_globals_too(together: Sequence[_Asking]) -> bool:
    """Whether an object is asked about some kinds of groups, or whether there are any, and the
    globals about others.
    """
    own = (
        each
        for each in together
        if not each.by_another and (each.axes or not _is_of_globals(each.base))
    )
    return len({_is_of_globals(each.base) for each in own}) == 2


def _all(plan: Plan, index: Index) -> Iterator[_Asking]:
    for each in plan.decisions:
        unit = each.located.use.scope.unit
        if unit is not None and not stands_in(each.located.use, _NAMES):
            is_for_want = each.base is GLOBALS and each.answer.takes is not Takes.GLOBALS
            axes = asked_about(each.located.site)
            yield _Asking(unit, each.located.path, axes, each.base, is_for_want)
    for passing in plan.passing:
        unit = passing.reference.use.scope.unit
        if unit is not None and passing.base is not GLOBALS:
            axes = frozenset[str]().union(*map(axes_of, passing.needs))
            yield _Asking(unit, passing.reference.path, axes, passing.base, hands_on=True)
    left = {id(each.site) for each in plan.left if each.reason not in _OF_NO_GROUP}
    own = {id(each.site) for each in plan.left if each.reason == "unknown-name"}
    of_others = {id(each.site) for each in plan.left if each.reason == "not-in-core"}
    for located in index.located:
        unit = located.use.scope.unit
        if id(located.site) in own and unit is not None and is_of_a_group(located.site.name):
            # No object of a class has a group of a fork's own, so a method stays as it is.
            if located.site.kind is Kind.CALL and not self_of(unit):
                yield _Asking(unit, located.path, AXES, None)
        elif id(located.site) in of_others and unit is not None:
            # A group of an older Megatron-core: its ranks are told together with those of others.
            if located.site.kind is Kind.CALL and is_of_a_group(located.site.name):
                yield _Asking(unit, located.path, named_in(located.site.name), None)
        elif id(located.site) in left and unit is not None:
            if located.site.kind is Kind.CALL:
                yield _Asking(unit, located.path, asked_about(located.site), None)
            elif located.site.kind is Kind.PRIVATE:
                axes = axes_of(located.site.name.lower())
                yield _Asking(unit, located.path, axes, None)
            elif located.site.kind is Kind.MODULE and is_argument(located.node, unit.node):
                yield _Asking(unit, located.path, AXES, None)


def stands_in(use: Use, names: tuple[str, ...]) -> bool:
    """Whether a use is for where there is nothing in a variable of its function that has one of
    some names; or fills a collection there.
    """
    unit = use.scope.unit
    return unit is not None and _stands_in(unit, use, names)


@kept
def _stands_in(unit: Scope, use: Use, names: tuple[str, ...]) -> bool:
    around = statements_around(use.parents, unit.node)
    return any(
        is_ruled_out(name, around, unit.node)
        or (
            name in COLLECTION_NAMES
            and begins_ruled_out(name, around, unit.node)
            and is_filled(name, unit)
        )
        for name in unit.bindings.keys() & {*names}
    )


def _is_of_globals(base: Base | None) -> bool:
    return base is None or base.expression == "None"


def _is_of_self(asking: _Asking) -> bool:
    """Whether the object of a method is asked, be it by a variable for its model; or what its
    constructor is passed, which is the same.
    """
    if asking.base is None:
        return False
    if asking.of in COLLECTION_NAMES and class_of(asking.unit) is not None:
        return True
    own = self_of(asking.unit)
    return bool(own) and (asking.of == own or is_of_its_object(asking.of, asking.unit))
