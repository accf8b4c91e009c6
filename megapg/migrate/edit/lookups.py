"""One look-up for the places of a function that ask for the same collection: before which statement
it stands, and who has its result.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megapg.migrate.decide.decisions import Base, Decision, Passing
from megapg.migrate.edit.places import LookUp, Place, blocks_in, of_one_collection
from megapg.migrate.edit.spans import Spans
from megapg.migrate.find.models import gives_a_model
from megapg.migrate.python.flow import (
    LOOP,
    TRY,
    begins_before,
    binding_statements,
    common_block,
    first_read,
    is_certain,
    is_repeated,
    runs_before,
    statements_in,
    within,
)
from megapg.migrate.python.methods import shown_until
from megapg.migrate.python.scopes import FunctionNode, Instance, Opaque, Scope

_OWN = FunctionNode | ast.ClassDef  # with a scope of its own


def look_ups(
    asking: Sequence[Decision | Passing],
    is_free: Callable[[ast.stmt], bool],
    spans: Spans,
) -> Iterator[tuple[Scope, Base, list[LookUp]]]:
    """The look-ups that several places of a function share, or that one in a loop has before it:
    for each function and expression those that may have one variable.

    Args:
        asking: all that ask for a collection, in one file.
        is_free: whether a statement can be put before another one.
        spans: of the functions, each of which has look-ups of its own.
    """
    groups: dict[tuple[Scope, int, str, str, bool], list[Place]] = {}
    for each in asking:
        place = Place(each)
        function = place.use.scope.enclosing("function", "class", "module")
        if function is None or (span := spans.of(place.line, function)) is None:
            continue
        if place.is_looked_up and place.may_have_a_variable(function):
            key = (function, span, place.base.form, place.base.expression, place.base.passed_first)
            groups.setdefault(key, []).append(place)
    served: set[Decision | Passing] = set()
    # The outermost first: what was passed, and looked up there, serves the functions in it, too.
    order = sorted(groups.items(), key=lambda each: (_depth(each[0][0]), -len(each[1])))
    within: dict[tuple[object, ...], list[tuple[Scope, list[Place]]]] = defaultdict(list)
    for (function, _, *of), places in order:
        for around in function.chain():
            within[around, *of].append((function, places))
    for (function, span, *of), places in order:
        rest = [each for each in places if each.what not in served]
        inner = [
            each
            for other, several in within[function, *of]
            if function.kind == "function" and _means_the_same(other, function, places[0].base)
            for each in several
            if spans.of(each.line, function) == span
        ]
        looking = _Function(function, is_free, partial(spans.has, span, function))
        for group in of_one_collection(function, rest):
            together = [each for each in group if each.what not in served]
            if not together:
                continue
            found = [
                _shared_with(each, inner, function)
                for each in looking.with_functions(inner, together)
            ]
            # What asks for no field takes what is looked up before it comes to that.
            bare = [e for e in rest if not (e.needs or e.is_apart or e.what in served)]
            for at, one in enumerate(found):
                behind = _behind(one.before, looking.of_the_same(bare, one), function)
                more = [e for e in behind if e not in one.members]
                found[at] = replace(one, members=(*one.members, *more))
                bare = [e for e in bare if e.what not in more]
            served |= {each for look_up in found for each in look_up.members}
            if found:
                yield function, together[0].base, found


def _depth(function: Scope) -> int:
    return len([*function.chain()])


def _means_the_same(function: Scope, outer: Scope, base: Base) -> bool:
    """Whether a function in another one can use what that has looked up of what it was passed: a
    collection, or nothing; or a model, where it is that one all along.
    """
    name, each = base.expression, function
    bound = outer.bindings.get(name, ())
    is_set_once = [isinstance(e, Instance) or getattr(e, "parameter", False) for e in bound]
    if base.form != "resolve" and is_set_once != [True]:
        return False
    while each is not outer and each.parent is not None and not each.given_to:
        if each.kind == "class" or name in each.bindings or shown_until(each):
            return False  # what it reads of the function around is seen among its own, too
        each = each.parent
    return function is not outer and each is outer


def _shared_with(look_up: LookUp, inner: Sequence[Place], function: Scope) -> LookUp:
    """A look-up with the functions further in that it serves as well."""
    serving = [each for each in inner if each.is_served_behind(look_up, function)]
    found = list(_behind(look_up.before, serving, function))
    needs = {need for each in serving if each.what in found for need in each.needs}
    needed = tuple(sorted({*look_up.needs, *needs}))
    return replace(look_up, needs=needed, members=(*look_up.members, *found))


def _behind(
    before: ast.stmt, places: Iterable[Place], function: Scope
) -> Iterator[Decision | Passing]:
    """Of some places those that are only come to when a statement of a function has begun."""
    for each in places:
        if begins_before(before, each.around(function.node), function.node):
            yield each.what


@dataclass(frozen=True)
class _Function:
    """A function in which look-ups are to be put."""

    scope: Scope
    can_be_before: Callable[[ast.stmt], bool]
    is_in_time: Callable[[ast.stmt], bool]  # whether what is bound there is what it is to be

    def is_free(self, statement: ast.stmt) -> bool:
        """Whether a look-up can be put before a statement."""
        return self.is_in_time(statement) and self.can_be_before(statement)

    @cached_property
    def node(self) -> ast.AST:
        """The function's node."""
        return self.scope.node

    def with_functions(self, inner: Sequence[Place], places: Sequence[Place]) -> Iterator[LookUp]:
        """The look-ups of places that one collection serves: before the first of the functions in
        this one that can use it, too, where such a function comes before them.
        """
        found = list(self.look_ups(places))
        if not found and len(places) == 1:
            found = list(self._with_one(inner, places[0]))
        for each in found:
            first = self._first_function(inner, places, each)
            yield each if first is None else replace(each, before=first)

    def _with_one(self, inner: Sequence[Place], place: Place) -> Iterator[LookUp]:
        """The look-up that one place shares with functions in this one, if any."""
        around = place.around(self.node)
        if (
            place.base.form != "resolve"
            or not inner
            or not around  # in a lambda there is no place for it
            or any(isinstance(each, TRY) for each in around)
        ):
            return
        at, looked_up = around[-1], LookUp(around[-1], tuple(place.needs), (place.what,))
        begins = (
            self.is_free(at) and not isinstance(at, _OWN) and any(_behind(at, inner, self.scope))
        )
        if begins or self._first_function(inner, [place], looked_up) is not None:
            yield looked_up

    def _first_function(
        self, inner: Sequence[Place], places: Sequence[Place], found: LookUp
    ) -> ast.stmt | None:
        """The first of the functions with some places in them that is before a look-up."""
        if not inner or not self._is_passed(inner[0].base.expression):
            return None
        if inner[0].base.form != "resolve":
            if inner[0].base.expression not in self.scope.instances:
                return None
            inner = [each for each in inner if each.is_served_behind(found, self.scope)]
        chains = [each.around(self.node) for each in places]
        around = next(chain for chain in chains if found.before in chain)
        around = around[: around.index(found.before) + 1]
        chains = [each.around(self.node) for each in inner]
        # A lambda, or a comprehension, is no statement: it is in one.
        functions = {
            next((each for each in chain if isinstance(each, _OWN)), chain[-1]) for chain in chains
        }
        before = [e for e in functions if runs_before(e, around, self.node) and self.is_free(e)]
        if places[0].base.form != "resolve":  # nothing but functions is between
            before = [each for each in before if self._is_next_to(each, found.before)]
        return min(before, key=lambda each: each.lineno, default=None)

    def _is_next_to(self, function: ast.stmt, before: ast.stmt) -> bool:
        """Whether a statement follows a function, be it behind others."""
        for block in blocks_in(self.scope):
            if function in block and before in block:
                return all(
                    isinstance(e, _OWN) for e in block[block.index(function) : block.index(before)]
                )
        return False

    def of_the_same(self, places: Sequence[Place], found: LookUp) -> Iterator[Place]:
        """The places that would look up the same as is there already: of a parameter that is never
        bound anew, or an object that is given no model in between.
        """
        for each in places:
            name, last = each.base.expression, each.around(self.node)[-1:]
            is_set_once = len(self.scope.bindings.get(name, ())) == 1 and self._is_passed(name)
            if is_set_once and last and not self._may_get_a_model(name, found.before, last[0]):
                yield each

    def _is_passed(self, name: str) -> bool:
        """Whether a name is nothing else than a parameter of the function, or a constant."""
        bindings = self.scope.bindings.get(name, ())
        return all(
            isinstance(each, Instance) or (isinstance(each, Opaque) and each.parameter)
            for each in bindings
        )

    def look_ups(self, places: Sequence[Place]) -> Iterator[LookUp]:
        """The look-ups of places that one collection serves."""
        chains = {i: each.around(self.node) for i, each in enumerate(places)}
        since: dict[int, list[int]] = {}  # the object got its last model
        for i, each in enumerate(places):
            since.setdefault(self._models_before(each), []).append(i)
        waiting: list[tuple[Sequence[int], ast.AST, int]]
        waiting = [(some, self.node, 0) for some in since.values()]
        while waiting:
            some, outer, depth = waiting.pop()
            # An error of a look-up belongs to the try that a read is in.
            free = [i for i in some if not any(isinstance(e, TRY) for e in chains[i][depth:])]
            before = self._before({i: chains[i] for i in free}, places, outer, depth)
            if before is not None:
                rest = [i for i in some if i not in free]
                free += [i for i in rest if runs_before(before, chains[i], self.node)]
                members = [places[i] for i in sorted(free)]
                needs = {need for each in members for need in each.needs}
                what = tuple(each.what for each in members)
                yield LookUp(before, tuple(sorted(needs)), what)
                some = [i for i in rest if i not in free]
            parts: dict[tuple[ast.stmt, int], list[int]] = {}
            for i in some:
                if len(chains[i]) > depth + 1:
                    statement, inner = chains[i][depth : depth + 2]
                    parts.setdefault((statement, within(statement, inner)), []).append(i)
            waiting += [(part, statement, depth + 1) for (statement, _), part in parts.items()]

    def _before(
        self,
        chains: Mapping[int, Sequence[ast.stmt]],
        places: Sequence[Place],
        outer: ast.AST,
        depth: int,
    ) -> ast.stmt | None:
        """The statement before which a look-up serves some places; None where there is none, or the
        look-up is better made at the one place.
        """
        common = common_block(chains, outer, depth)
        if common is None:
            return None
        chain: Sequence[ast.stmt] = chains[common.runs[0][1][0]]
        some = [places[i] for i in chains]
        loops = [i for i in range(depth, common.depth) if isinstance(chain[i], LOOP)]
        # Before the outermost loop; where that can't be, as near as can be, for several of them.
        places_for_it = [*loops, *range(common.depth, depth - 1, -1)]
        if len(some) == 1:
            again = is_repeated(some[0].use.node, some[0].use.parents)
            places_for_it = loops + [common.depth] * again
        for i in places_for_it:
            *_, before = around = chain[: i + 1]
            if self._fits(around, common.runs[-1][0], some):
                return before
        return None

    def _fits(self, around: Sequence[ast.stmt], last: ast.stmt, some: Sequence[Place]) -> bool:
        """Whether what is looked up before a statement is what some places would look up."""
        before, expression = around[-1], some[0].base.expression
        if isinstance(before, _OWN) or not self.is_free(before):
            return False
        uses = [each.use for each in some]
        # Who reads it in that very statement, for certain, has it whichever branch gave it.
        reads = last is before and any(is_certain(e.node, e.parents, before) for e in uses)
        if not _is_bound(expression, around, last, self.scope, reads=reads):
            return False
        if isinstance(before, LOOP):  # the next turn reads it as well
            return not self._may_get_a_model(expression, before, before)
        sure = first_read(self.node, uses) is before
        return sure or not self._may_get_a_model(expression, before, last)

    def _may_get_a_model(self, instance: str, first: ast.stmt, last: ast.stmt) -> bool:
        """Whether an object that is to be asked may be given a model in between."""
        end = last.end_lineno or last.lineno
        given = self._given_models if instance in self.scope.instances else ()
        return any(first.lineno <= each <= end for each in given)

    def _models_before(self, place: Place) -> int:
        """How many times the object that is asked may have been given a model before."""
        given = self._given_models if place.base.expression in self.scope.instances else ()
        return sum(each < place.line for each in given)

    @cached_property
    def _given_models(self) -> list[int]:
        """The lines behind which an object has been given a model."""
        klass = self.scope.parent
        return [
            each.end_lineno or each.lineno
            for each in (statements_in(self.node) if klass is not None else ())
            if klass is not None and gives_a_model(each, self.scope, [klass], 0)
        ]


def _is_bound(
    expression: str, around: Sequence[ast.stmt], last: ast.stmt, function: Scope, *, reads: bool
) -> bool:
    """Whether what a look-up starts from is there when the last of some statements begins, and
    nothing else takes its name from there to the end of another one.
    """
    name, _, attribute = expression.partition(".")
    bindings, before = function.bindings.get(name, ()), around[-1]
    end = max(each.end_lineno or each.lineno for each in (before, last))
    if any(before.lineno < each.line <= end for each in bindings):
        return False
    if any(each.line == before.lineno for each in bindings) and last is not before:
        return False
    if _is_written(attribute, function):
        return False
    if reads or not bindings or isinstance(bindings[0], Instance):
        return True
    if isinstance(bindings[0], Opaque) and bindings[0].parameter:
        return True
    return any(
        statement is not before and runs_before(statement, around, function.node)
        for statement in binding_statements(function.node, name)
    )


def _is_written(attribute: str, function: Scope) -> bool:
    """Whether a function writes an attribute of that name, or what a property gives by it."""
    return any(
        isinstance(each, ast.Attribute)
        and not isinstance(each.ctx, ast.Load)
        and each.attr.lstrip("_") == attribute
        for each in function.nodes
    )
