"""The edits of one file, from what was decided about it."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megapg.migrate.flow import (
    binding_statements,
    first_read,
    parts,
    runs_before,
    statements_around,
)
from megapg.migrate.functions import PARAMETER
from megapg.migrate.imports import Imports, names_of
from megapg.migrate.insert import (
    add_argument,
    add_behind,
    add_parameter,
    add_statement,
    newline_of,
)
from megapg.migrate.locate import quote_in
from megapg.migrate.mapping import OPTIONAL_FIELDS, Takes
from megapg.migrate.migration import Edit
from megapg.migrate.plan import Base, Decision, Passing, Taking, group_name
from megapg.migrate.scopes import Analysis, Instance, Opaque, Scope, Use
from megapg.migrate.source import Source

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
    """

    def __init__(self, source: Source, analysis: Analysis) -> None:
        self._source, self._analysis = source, analysis
        self._imports = Imports(source, analysis)
        self._edits: list[Edit] = []
        self._gone: set[Use] = set()
        self._looked_up: dict[tuple[Scope, Base], list[_LookedUp]] = {}

    @property
    def released(self) -> set[str]:
        """The names that may have lost their last use."""
        return names_of(self._gone)

    def edits(self, kept: Collection[str]) -> list[Edit]:
        """All edits, in the order of the file.

        Args:
            kept: names that others import from this file.
        """
        imports = self._imports.edits(self._gone, kept)
        return sorted([*self._edits, *imports], key=lambda each: (each.start, each.stop))

    # -- parameters and arguments --------------------------------------------------------------

    def give_parameter(self, taking: Taking) -> bool:
        """Add the parameter to a function; False where its text is too odd for that."""
        node = taking.function.node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        names = [group_name(field) for field in taking.fields] or [PARAMETER]
        edits = add_parameter(self._source, node, [self._declared(n, taking, node) for n in names])
        if not edits:
            return False
        if taking.kept:
            edits += self._keep(taking, node)
        if taking.fields and taking.first is not None:
            looked_up = newline_of(self._source).join(
                f"{name} = {self._imports.megapg()}.resolve(None).{field} "
                f"if {name} is None else {name}"
                for name, field in zip(names, taking.fields, strict=True)
            )
            statement = add_statement(self._source, taking.first, looked_up)
            if statement is None:
                return False
            edits.append(statement)
        self._edits += edits
        return True

    def _declared(
        self, name: str, taking: Taking, node: ast.FunctionDef | ast.AsyncFunctionDef
    ) -> str:
        if not _is_annotated(node):
            return f"{name}=None"
        kind = "ProcessGroup" if taking.fields else "ProcessGroupCollection"
        return f'{name}: "{self._imports.megapg()}.{kind} | None" = None'

    def _keep(self, taking: Taking, node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[Edit]:
        arguments = [*node.args.posonlyargs, *node.args.args]
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if not arguments or not body or taking.function.parent is None:
            return []
        statement = f"{arguments[0].arg}.{PARAMETER} = {PARAMETER}"
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
        arguments = [f"{group_name(field)}={written}.{field}" for field in passing.fields]
        arguments = arguments or [f"{PARAMETER}={written}"]
        if call is None:  # it is called by another name
            begin, end = self._source.extent(passing.reference.node)
            bound = ", ".join([self._source.text[begin:end], *arguments])
            self._edits.append(Edit(begin, end, f"{self._imports.partial()}({bound})", "site"))
            return True
        edits = add_argument(self._source, call, arguments)
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
        for decision in sorted(decisions, key=lambda d: d.located.end - d.located.begin):
            wanted = dict(self._imports.wanted)
            text = self._text(decision, local.get(decision))
            if text is None:
                self._imports.wanted = wanted
                continue
            for inner, its_text in reversed(written.items()):  # in its arguments; larger ones first
                if _is_inside(inner, decision):
                    text = text.replace(inner.located.site.text, its_text)
            written[decision] = text
        for decision, text in written.items():
            self._gone.add(decision.located.use)
            if not any(other is not decision and _is_inside(decision, other) for other in written):
                located = decision.located
                self._edits.append(Edit(located.begin, located.end, text, "site"))
        return written

    def _text(self, decision: Decision, local: str | None) -> str | None:
        located, answer, base = decision.located, decision.answer, decision.base
        if base.form == "group":
            return answer.write_narrow(base.expression)
        pg = local or self._collection(base, answer.needs)
        getters = self._imports.getters() if answer.needs_getters else ""
        text = answer.write(pg, getters)
        if located.site.in_fstring:
            return self._in_string(text, decision)
        return text

    def _in_string(self, text: str, decision: Decision) -> str | None:
        """With quotes that the string around does not have, as Python wants it before 3.12."""
        located = decision.located
        if '"' not in text:
            return text
        quote = quote_in(self._source, located.begin, located.use.parents)
        if quote is None or "'" in text:
            return None
        return text.replace('"', quote)

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
        for share in (self._share_all, self._share_parts):
            for (function, base), members in largest:
                found = dict(share(function, base, members)) if function not in done else {}
                if found:
                    done.add(function)
                    shared |= found
        return shared

    def _share_all(
        self, function: Scope, base: Base, members: Sequence[Decision]
    ) -> Iterator[tuple[Decision, str]]:
        name = self._hoist(function, base, members) if len(members) > 1 else None
        if name is not None:
            yield from ((member, name) for member in members)

    def _share_parts(
        self, function: Scope, base: Base, members: Sequence[Decision]
    ) -> Iterator[tuple[Decision, str]]:
        """For reads without a look-up that all of them can share: one for each part of them."""
        if base.form == "groups_of":  # for other fields it may find another collection
            each = Counter(member.answer.needs for member in members)
            needs = max(each, key=lambda one: each[one])
            members = [member for member in members if member.answer.needs == needs]
        waiting = [members]
        while waiting:
            some = waiting.pop()
            found = dict(self._share_all(function, base, some))
            yield from found.items()
            if not found and len(some) > 1:
                around = [
                    statements_around(member.located.use.parents, function.node) for member in some
                ]
                waiting += [[some[i] for i in part] for part in parts(around, function.node)]

    def _hoist(self, function: Scope, base: Base, members: Sequence[Decision]) -> str | None:
        """Put the look-up before the first statement that certainly makes one of the reads."""
        name = self._free_name
        first = first_read(function.node, [member.located.use for member in members])
        if first is None or name is None:
            return None
        begin = min(member.located.begin for member in members)
        calls = (each for each in ast.walk(first) if isinstance(each, ast.Call))
        if base.form == "resolve" and any(self._source.extent(c)[1] <= begin for c in calls):
            return None  # it may initialise the groups, which resolve() wants to be there
        parents = next(
            member.located.use.parents
            for member in members
            if first in statements_around(member.located.use.parents, function.node)
        )
        around = statements_around(parents, function.node)
        if not _is_bound(base.expression, around[: around.index(first) + 1], function):
            return None
        needs = tuple(sorted({need for member in members for need in member.answer.needs}))
        edit = add_statement(self._source, first, f"{name} = {self._collection(base, needs)}")
        if edit is None:
            return None
        self._edits.append(edit)
        self._looked_up.setdefault((function, base), []).append(_LookedUp(name, needs, first))
        return name

    @cached_property
    def _free_name(self) -> str | None:
        """A name for a collection that is no word of the file."""
        text = self._source.text
        for name in _LOCAL_NAMES:  # most are nowhere in it
            if not any(_is_whole(text, found) for found in re.finditer(rf"{name}\b", text)):
                return name
        return None


def _is_whole(text: str, found: re.Match[str]) -> bool:
    before = text[max(found.start() - 1, 0) : found.start()]
    return not (before.isalnum() or before == "_")


def _for_all_layouts(function: Scope, base: Base, members: list[Decision]) -> list[Decision]:
    """Without the reads, in inner blocks, of what some layouts have only and no other read needs:
    for these a model's collection is not to be given up.
    """
    chains = [statements_around(each.located.use.parents, function.node) for each in members]
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
    given = node.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return any(each.annotation is not None for each in every) or node.returns is not None


def _is_inside(inner: Decision, outer: Decision) -> bool:
    one, other = inner.located, outer.located
    return one is not other and other.begin <= one.begin and one.end <= other.end
