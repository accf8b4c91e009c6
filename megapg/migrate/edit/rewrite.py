"""The edits of one file, from what was decided about it."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megapg.migrate.decide.decisions import Base, Decision, Passing, Taking
from megapg.migrate.decide.functions import PARAMETER
from megapg.migrate.edit.relayout import relaid
from megapg.migrate.edit.style import Style, quote_of
from megapg.migrate.find.index import Located
from megapg.migrate.find.meaning import PARALLEL_STATE
from megapg.migrate.migration import Edit
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.flow import (
    before_all,
    binding_statements,
    by_block,
    certainly_reads,
    common_block,
    first_read,
    is_made_on_each_way,
    runs_before,
    statements_around,
)
from megapg.migrate.python.imports import MEGAPG, Imports, Runtime, names_of
from megapg.migrate.python.insert import add_argument, add_behind, add_parameter, add_statement
from megapg.migrate.python.locate import quote_in
from megapg.migrate.python.methods import body_of, first_parameter, parameters
from megapg.migrate.python.scopes import Instance, Opaque, Scope, Use
from megapg.migrate.python.source import Source
from megapg.upstream.mapping import OPTIONAL_FIELDS, Takes

# What a collection is called that several reads of a function share; the first that is free.
_LOCAL_NAMES = ("pg", "groups", "pg_", "groups_")
# Who has a pipeline's group has those of its embeddings, be they None.
_OF_SOME_LAYOUTS = OPTIONAL_FIELDS - {"embd", "pos_embd"}


@dataclass(frozen=True)
class _LookedUp:
    """A variable with a collection: its name, the fields that were asked for, and the statement
    before which it is bound.
    """

    name: str
    needs: tuple[str, ...]
    before: ast.stmt


class Writer:
    """Collects the edits of one file.

    Args:
        source: the file.
        analysis: its scopes.
        style: how the project wants it written.
        runtime: what its new text calls.
    """

    def __init__(
        self, source: Source, analysis: Analysis, style: Style, runtime: Runtime = MEGAPG
    ) -> None:
        self._source, self._analysis = source, analysis
        self._imports = Imports(source, analysis, style.order, style.is_sorted, runtime)
        self._style = style
        self._edits: list[Edit] = []
        self._gone: set[Use] = set()
        self._looked_up: dict[tuple[Scope, Base], list[_LookedUp]] = {}

    @property
    def released(self) -> set[str]:
        """The names that may have lost their last use."""
        return names_of(self._gone)

    def drops(self, name: str, kept: Collection[str]) -> bool:
        """Whether the module does not import a name any more that others take none of."""
        return self._imports.drops(name, self._gone, kept)

    def patch_the_globals(self, located: Located) -> bool:
        """Have a string name what it patches where that is; False where it is not a plain one."""
        begin, end = located.begin, located.end
        quote, path = self._source.text[begin], getattr(located.node, "value", None)
        if not isinstance(path, str) or self._source.text[begin:end] != f"{quote}{path}{quote}":
            return False
        new = ".".join(filter(None, [*PARALLEL_STATE, located.site.name]))
        self._edits.append(Edit(begin, end, f"{quote}{new}{quote}", "site"))
        return True

    def edits(self, kept: Collection[str]) -> list[Edit]:
        """All edits, in the order of the file.

        Args:
            kept: names that others import from this file.
        """
        imports = self._imports.edits(self._gone, kept)
        edits = sorted([*self._edits, *imports], key=lambda each: (each.start, each.stop))
        return relaid(self._source, edits, self._style)

    # -- parameters and arguments --------------------------------------------------------------

    def give_parameter(self, taking: Taking) -> bool:
        """Add the parameter to a function; False where its text is too odd for that."""
        node = taking.function.node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        declared = f"{PARAMETER}=None"
        if _is_annotated(node):
            kind = f"{self._imports.megapg()}.ProcessGroupCollection | None"
            if not _has_lazy_annotations(self._source.tree):
                kind = f"{self._quote}{kind}{self._quote}"
            declared = f"{PARAMETER}: {kind} = None"
        edits = add_parameter(self._source, node, declared)
        if not edits:
            return False
        if taking.kept:
            edits += self._keep(taking, node)
        self._edits += edits
        return True

    def _keep(self, taking: Taking, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Edit]:
        instance, body = first_parameter(node), body_of(node)
        if not instance or not body:
            return []
        statement = f"{instance}.{PARAMETER} = {PARAMETER}"
        first = add_statement(self._source, body[0], statement)
        behind = [add_behind(self._source, each, statement) for each in taking.behind]
        if behind and all(map(operator.is_, taking.behind, body)):
            edits = behind[-1:]  # nothing else runs before that one
        else:
            edits = [first, *behind]
        return [each for each in edits if each is not None]

    def pass_argument(self, passing: Passing) -> bool:
        """Pass the collection in a call; False where its text is too odd for that."""
        call = passing.reference.call
        written = self._at_hand(passing) or self._collection(passing.base, passing.needs)
        argument = self._in_quotes(f"{PARAMETER}={written}")
        if call is None:  # it is called by another name
            begin, end = self._source.extent(passing.reference.node)
            bound = f"{self._source.text[begin:end]}, {argument}"
            self._edits.append(Edit(begin, end, f"{self._imports.partial()}({bound})", "site"))
            return True
        edits = add_argument(self._source, call, argument)
        self._edits += edits
        return bool(edits)

    def _at_hand(self, passing: Passing) -> str:
        """The variable that has the collection already; empty where there is none."""
        use = passing.reference.use
        function = use.scope.enclosing("function", "class", "module")
        every = self._looked_up.get((function, passing.base), []) if function is not None else []
        if function is None or len(every) != 1:  # of several the last may have other fields
            return ""
        (found,) = every
        if not {*passing.needs} <= {*found.needs}:
            return ""
        around = statements_around(use.parents, function.node)
        is_bound = found.before in around or runs_before(found.before, around, function.node)
        return found.name if is_bound else ""

    # -- reads ---------------------------------------------------------------------------------

    def serve(self, decisions: Sequence[Decision]) -> dict[Decision, str]:
        """Rewrite the uses; what is written for each. Those that can't be are left out."""
        local = self._shared(decisions)
        written: dict[Decision, str] = {}
        smallest_first = sorted(decisions, key=lambda d: d.located.end - d.located.begin)
        inside = _inside_others(smallest_first)
        for decision in smallest_first:
            wanted = dict(self._imports.wanted)
            text = self._text(decision, local.get(decision))
            if text is None:
                self._imports.wanted = wanted
                continue
            # In its arguments; larger ones first.
            for inner in reversed(inside.get(decision, ())):
                if inner in written:
                    text = text.replace(inner.located.site.text, written[inner])
            written[decision] = text
        within = {each for outer, inner in inside.items() if outer in written for each in inner}
        for decision, text in written.items():
            self._gone.add(decision.located.use)
            if decision not in within:
                located = decision.located
                self._edits.append(Edit(located.begin, located.end, text, "site"))
        return written

    def _text(self, decision: Decision, local: str | None) -> str | None:
        located, answer, base = decision.located, decision.answer, decision.base
        pg = local or self._collection(base, answer.needs)
        getters = self._imports.getters() if answer.needs_getters else ""
        text = answer.write(pg, getters)
        if not located.site.in_fstring or '"' not in text:
            return self._in_quotes(text)
        # With quotes that the string around does not have, as Python wants it before 3.12.
        quote = quote_in(self._source, located.begin, located.use.parents)
        return None if quote is None or "'" in text else text.replace('"', quote)

    @cached_property
    def _quote(self) -> str:
        return quote_of(self._source, self._style)

    def _in_quotes(self, text: str) -> str:
        """New text with the quotes of the file."""
        return text if "'" in text else text.replace('"', self._quote)

    def _collection(self, base: Base, needs: Sequence[str]) -> str:
        if base.form == "plain":
            return base.expression
        fields = "".join(f', "{name}"' for name in needs) if base.form == "groups_of" else ""
        function = "resolve" if base.form == "resolve" else "groups_of"
        passed = f"{PARAMETER} or " if base.passed_first else ""
        return f"{passed}{self._imports.megapg()}.{function}({base.expression}{fields})"

    # -- one look-up for several reads ---------------------------------------------------------

    def _shared(self, decisions: Sequence[Decision]) -> dict[Decision, str]:
        """For reads that share one look-up: the variable that has its result."""
        groups: dict[tuple[Scope, Base], list[Decision]] = {}
        for decision in decisions:
            function = decision.located.use.scope.enclosing("function", "class", "module")
            looked_up = decision.base.form in ("resolve", "groups_of", "of_collection")
            at_once = decision.answer.takes is not Takes.LAZY
            if function is not None and function.kind == "function" and looked_up and at_once:
                groups.setdefault((function, decision.base), []).append(decision)
        groups = {at: _for_all_layouts(at[0], at[1], each) for at, each in groups.items()}
        shared: dict[Decision, str] = {}
        done: set[Scope] = set()
        largest = sorted(groups.items(), key=lambda each: -len(each[1]))
        for share in (self._share_all, self._share_before, self._share_parts):
            for (function, base), members in largest:
                found = dict(share(function, base, members)) if function not in done else {}
                if found:
                    done.add(function)
                    shared |= found
        return shared

    def _share_before(
        self, function: Scope, base: Base, members: Sequence[Decision]
    ) -> Iterator[tuple[Decision, str]]:
        """For reads in several branches, or in a loop: a look-up before all of them. What a model
        carries is looked up without a warning, and the globals are only turned to by a read.
        """
        if base.form == "groups_of":  # for other fields it may find another collection
            each = Counter(member.answer.needs for member in members)
            needs = max(each, key=lambda one: each[one])
            members = [member for member in members if member.answer.needs == needs]
        chains = {i: _around(member, function) for i, member in enumerate(members)}
        first = before_all(chains, function.node)
        if first is None or _may_be_given_one(base.expression, first, function):
            return
        uses = [member.located.use for member in members]
        if base.form != "groups_of" and not is_made_on_each_way(first, uses, function.node):
            return
        inside = [each for i, each in enumerate(members) if first in chains[i]]
        name = self._hoist(function, base, first, inside, members)
        if name is not None:
            yield from ((member, name) for member in members)

    def _share_all(
        self, function: Scope, base: Base, members: Sequence[Decision]
    ) -> Iterator[tuple[Decision, str]]:
        first = first_read(function.node, [member.located.use for member in members])
        if len(members) > 1 and first is not None:
            inside = [each for each in members if first in _around(each, function)]
            if (name := self._hoist(function, base, first, inside, members)) is not None:
                yield from ((member, name) for member in members)

    def _share_parts(
        self, function: Scope, base: Base, members: Sequence[Decision]
    ) -> Iterator[tuple[Decision, str]]:
        """For reads without a look-up that all of them can share: one for each part of them."""
        if base.form == "groups_of":  # for other fields it may find another collection
            each = Counter(member.answer.needs for member in members)
            needs = max(each, key=lambda one: each[one])
            members = [member for member in members if member.answer.needs == needs]
        chains = dict(enumerate(_around(member, function) for member in members))
        waiting: list[tuple[Collection[int], ast.AST, int]] = [(chains, function.node, 0)]
        while waiting:
            some, outer, depth = waiting.pop()
            common = common_block({i: chains[i] for i in some}, outer, depth)
            if common is None or len(some) < 2:
                continue
            last = len(common.runs) - 1
            for at, (statement, inside) in enumerate(common.runs):
                own = [i for i in inside if len(chains[i]) == common.depth + 1]
                name = None
                if (at < last or not last) and certainly_reads(
                    statement, (members[i].located.use for i in own)
                ):
                    rest = [members[i] for _, more in common.runs[at:] for i in more]
                    within = [members[i] for i in inside]
                    name = self._hoist(function, base, statement, within, rest)
                if name is not None:
                    yield from ((member, name) for member in rest)
                    break
                if last:
                    waiting.append((inside, common.outer, common.depth))
                else:
                    inner = by_block(chains, common)
                    waiting += [(part, statement, common.depth + 1) for part in inner]

    def _hoist(
        self,
        function: Scope,
        base: Base,
        first: ast.stmt,
        inside: Sequence[Decision],
        members: Sequence[Decision],
    ) -> str | None:
        """Put the look-up before a statement that certainly makes one of the reads: the members are
        those inside of it and those behind it.
        """
        name = self._free_name
        if name is None:
            return None
        begin = min(member.located.begin for member in inside)
        calls = (each for each in ast.walk(first) if isinstance(each, ast.Call))
        if base.form == "resolve" and any(self._source.extent(c)[1] <= begin for c in calls):
            return None  # it may initialise the groups, of which resolve() says if they are there
        around = _around(inside[0], function)
        if not _is_bound(base.expression, around[: around.index(first) + 1], function):
            return None
        needs = tuple(sorted({need for member in members for need in member.answer.needs}))
        looked_up = self._in_quotes(f"{name} = {self._collection(base, needs)}")
        edit = add_statement(self._source, first, looked_up)
        if edit is None:
            return None
        self._edits.append(edit)
        self._looked_up.setdefault((function, base), []).append(_LookedUp(name, needs, first))
        return name

    @cached_property
    def _free_name(self) -> str | None:
        """A name for a collection that is no word of the file."""
        text = self._source.text
        free = (n for n in _LOCAL_NAMES if n not in text or not re.search(rf"\b{n}\b", text))
        return next(free, None)


def _may_be_given_one(instance: str, first: ast.stmt, function: Scope) -> bool:
    """Whether an object may be given a model in a statement before which it is to be asked."""
    if instance not in function.instances:
        return False
    return any(
        isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load)
        if not isinstance(each, ast.Call)
        else any(isinstance(e, ast.Name) and e.id == instance for e in ast.walk(each))
        for each in ast.walk(first)
    )


def _around(decision: Decision, function: Scope) -> list[ast.stmt]:
    """The statements of a function around a read, from the outside in."""
    return statements_around(decision.located.use.parents, function.node)


def _for_all_layouts(function: Scope, base: Base, members: list[Decision]) -> list[Decision]:
    """Without the reads, in inner blocks, of what some layouts have only and no other read needs:
    for these a model's collection is not to be given up.
    """
    chains = [_around(each, function) for each in members]
    first = first_read(function.node, [each.located.use for each in members])
    if base.form != "groups_of" or first is None:
        return members
    depth = next(len(chain[: chain.index(first) + 1]) for chain in chains if first in chain)
    inner = {each for each, chain in zip(members, chains, strict=True) if len(chain) > depth}
    needed = {need for each in members if each not in inner for need in each.answer.needs}
    special = _OF_SOME_LAYOUTS - needed
    return [e for e in members if e not in inner or special.isdisjoint(e.answer.needs)]


def _is_bound(expression: str, around: Sequence[ast.stmt], function: Scope) -> bool:
    """Whether what a look-up starts from is there when the last of some statements begins."""
    name, _, attribute = expression.partition(".")
    bindings = function.bindings.get(name, ())
    if len(bindings) > 1 or _is_written(attribute, function):
        return False  # at another time it may be another one
    if not bindings or isinstance(bindings[0], Instance):
        return True
    if isinstance(bindings[0], Opaque) and bindings[0].parameter:
        return True
    return any(
        statement is not around[-1] and runs_before(statement, around, function.node)
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


def _is_annotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    annotations = [each.annotation for each in parameters(node)]
    return any(each is not None for each in (*annotations, node.returns))


def _has_lazy_annotations(tree: ast.Module) -> bool:
    """Whether a module has ``from __future__ import annotations``."""
    return any(
        isinstance(each, ast.ImportFrom)
        and each.module == "__future__"
        and any(name.name == "annotations" for name in each.names)
        for each in tree.body
    )


def _inside_others(decisions: Sequence[Decision]) -> dict[Decision, list[Decision]]:
    """The reads in the arguments of others, by these, both in the order that is given."""
    order = {decision: i for i, decision in enumerate(decisions)}
    found: dict[Decision, list[Decision]] = {}
    around: list[Decision] = []
    for each in sorted(decisions, key=lambda d: (d.located.begin, -d.located.end)):
        while around and around[-1].located.end < each.located.end:
            around.pop()
        for outer in around:
            found.setdefault(outer, []).append(each)
        around.append(each)
    return {outer: sorted(inner, key=lambda d: order[d]) for outer, inner in found.items()}
