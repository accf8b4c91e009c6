"""The edits of one file, from what was decided about it."""

from __future__ import annotations

import ast
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property

from megapg.migrate.decide.decisions import Base, Decision, Passing, Taking
from megapg.migrate.decide.functions import PARAMETER
from megapg.migrate.edit.described import described
from megapg.migrate.edit.lookups import look_ups
from megapg.migrate.edit.relayout import relaid
from megapg.migrate.edit.spans import Spans
from megapg.migrate.edit.style import Style, quote_of
from megapg.migrate.find.axes import axes_of
from megapg.migrate.find.meaning import PARALLEL_STATE
from megapg.migrate.migration import Edit
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.flow import blocks
from megapg.migrate.python.imports import MEGAPG, Imports, Runtime
from megapg.migrate.python.insert import (
    add_argument,
    add_behind,
    add_parameter,
    add_statement,
    newline_of,
)
from megapg.migrate.python.locate import quote_in
from megapg.migrate.python.methods import body_of, first_parameter, parameters
from megapg.migrate.python.scopes import FunctionNode, Imported, Scope, Use
from megapg.migrate.python.source import Source
from megapg.migrate.python.unused import Removed, names_of

# What a collection is called that several reads of a function share; the first that is free.
_LOCAL_NAMES = ("pg", "groups", "process_groups", "pg_")


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
        self._imports = Imports(
            source, analysis, style.order, style.is_sorted, style.is_linted, runtime
        )
        self._style = style
        self._called = {each.name for each in runtime}
        self._edits: list[Edit] = []
        self._gone: set[Use] = set()
        self._shared: dict[Decision | Passing, str] = {}

    @property
    def released(self) -> set[str]:
        """The names that may have lost their last use."""
        return names_of(self._gone)

    def drops(self, name: str, kept: Collection[str]) -> bool:
        """Whether the module does not import a name any more that others take none of."""
        return self._imports.drops(name, self._gone, kept)

    def patch_the_globals(self, patched: ast.expr, name: str) -> bool:
        """Have a test name what it patches where that is; False where it is no plain string."""
        begin, end = self._source.extent(patched)
        if isinstance(patched, ast.Attribute):
            new = self._imports.module(*PARALLEL_STATE)
        else:
            quote, path = self._source.text[begin], getattr(patched, "value", None)
            if self._source.text[begin:end] != f"{quote}{path}{quote}":
                return False
            new = f"{quote}{'.'.join(filter(None, [*PARALLEL_STATE, name]))}{quote}"
        self._edits.append(Edit(begin, end, new, "site"))
        return True

    def import_the_globals(self, imported: Imported, name: str) -> bool:
        """Have an import at the top of a test get the globals from where they are; False where it
        has to stay.
        """
        *package, module = PARALLEL_STATE
        renamed = f" as {name}" if name != module else ""
        new = f"from {'.'.join(package)} import {module}{renamed}"
        return self._imports.replace(imported, name, new)

    def removed(self, kept: Collection[str]) -> list[Removed]:
        """The imports that go, likewise."""
        return self._imports.removed(self._gone, kept)

    def edits(self, kept: Collection[str], staying: Collection[tuple[int, str]] = ()) -> list[Edit]:
        """All edits, in the order of the file.

        Args:
            kept: names that others import from this file.
            staying: the lines of imports that stay all the same, each with a name.
        """
        imports = self._imports.edits(self._gone, kept, staying)
        edits = sorted([*self._edits, *imports], key=lambda each: (each.start, each.stop))
        return relaid(self._source, tuple(edits), self._style)

    # -- parameters and arguments --------------------------------------------------------------

    def give_parameter(self, taking: Taking) -> bool:
        """Add the parameter to a function, and keep it; False where its text is too odd for
        that.
        """
        node = taking.function.node
        if not isinstance(node, FunctionNode):
            return False
        if not taking.is_new:
            self._edits += (edits := self._keep(taking, node))
            return bool(edits)
        declared = f"{PARAMETER}=None"
        if _is_annotated(node):
            kind = f"{self._imports.megapg()}.ProcessGroupCollection | None"
            if not _has_lazy_annotations(self._source.tree):
                kind = f"{self._quote}{kind}{self._quote}"
            declared = f"{PARAMETER}: {kind} = None"
        width = self._style.line_length
        applied = taking.applied
        by_place = applied is not None
        edits = add_parameter(self._source, node, declared, by_place=by_place, width=width)
        if not edits:
            return False
        if applied is not None:
            edits += [Edit(at, at, ", None", "gradient") for at in applied.gradients]
        if taking.kept:
            edits += self._keep(taking, node)
        edits += described(self._source, taking.function, width)
        self._edits += edits
        return True

    def _keep(self, taking: Taking, node: FunctionNode) -> list[Edit]:
        instance, body = first_parameter(node), body_of(node)
        if not instance or not body:
            return []
        statement = f"{instance}.{PARAMETER} = {PARAMETER}"
        first = add_statement(self._source, body[0], statement, over_comment=True)
        behind = [add_behind(self._source, each, statement) for each in taking.behind]
        if behind and (not taking.at_first or all(map(operator.is_, taking.behind, body))):
            edits = behind[-1:]  # nothing that asks for it runs before that one
        else:
            edits = [first, *behind]
        return [each for each in edits if each is not None]

    def pass_argument(self, passing: Passing) -> bool:
        """Pass the collection in a call; False where its text is too odd for that."""
        call = passing.reference.call
        written = self._shared.get(passing, "")
        if not written and not passing.as_read:
            written = self._collection(passing.base, passing.needs)
        name = "" if passing.reference.is_applied else f"{PARAMETER}="
        argument = self._in_quotes(f"{name}{written}")
        if passing.group:
            group = passing.as_read or self._in_quotes(f"{written}.{passing.needs[0]}")
            argument = f"{passing.group}={group}"
        if call is None:  # it is called by another name
            begin, end = self._source.extent(passing.reference.node)
            bound = f"{self._source.text[begin:end]}, {argument}"
            self._edits.append(Edit(begin, end, f"{self._imports.partial()}({bound})", "site"))
            return True
        edits = add_argument(self._source, call, argument, self._style.line_length)
        self._edits += edits
        return bool(edits)

    # -- reads ---------------------------------------------------------------------------------

    def serve(self, decisions: Sequence[Decision]) -> dict[Decision, str]:
        """Rewrite the uses; what is written for each. Those that can't be are left out."""
        written: dict[Decision, str] = {}
        smallest_first = sorted(decisions, key=lambda d: d.located.end - d.located.begin)
        inside = _inside_others(smallest_first)
        for decision in smallest_first:
            wanted = dict(self._imports.wanted)
            text = self._text(decision)
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

    def _text(self, decision: Decision) -> str | None:
        located, answer, base = decision.located, decision.answer, decision.base
        if decision.as_read:
            return decision.as_read + ("" if answer.asks == "group" else f".{answer.asks}()")
        pg = self._shared.get(decision) or self._collection(base, answer.needs)
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
        passed = f"{PARAMETER} or " if base.passed_first else ""
        return f"{passed}{self._imports.megapg()}.{base.form}({base.expression}{fields})"

    # -- one look-up for several places --------------------------------------------------------

    def share(self, asking: Sequence[Decision | Passing], spans: Spans) -> None:
        """Look up once what several places of a function ask for, or one in a loop."""
        taken: dict[Scope, set[str]] = defaultdict(set)
        for function, base, found in look_ups(asking, self._is_free, spans):
            of_experts = all("ep" in axes_of(need) for each in found for need in each.needs)
            wanted = ("expert_pg",) if of_experts and taken[function] else _LOCAL_NAMES
            name = self._free_name(function, wanted, taken[function])
            if name is None:
                continue
            taken[function].add(name)
            for each in found:
                for scope in _further_in(function, each.members):
                    taken[scope].add(name)  # it reads that of the function around
                looked_up = self._in_quotes(f"{name} = {self._collection(base, each.needs)}")
                if isinstance(each.before, FunctionNode):
                    looked_up += newline_of(self._source)  # and a blank line before that
                # The comment above it is about that, and no heading of several.
                is_its_own = any(blocks(each.before)) or self._ends_a_paragraph(each.before)
                edit = add_statement(self._source, each.before, looked_up, over_comment=is_its_own)
                if edit is not None:
                    self._edits.append(edit)
                    self._shared |= dict.fromkeys(each.members, name)

    def _is_free(self, statement: ast.stmt) -> bool:
        return add_statement(self._source, statement, "") is not None

    def _ends_a_paragraph(self, statement: ast.stmt) -> bool:
        """Whether a blank line, a comment, or the end of its block follows a statement."""
        end = statement.end_lineno or statement.lineno
        if end >= len(self._source.line_starts):
            return True
        following = self._source.line_text(end + 1)
        text = following.lstrip(" \t\f")
        is_further_out = len(following) - len(text) < statement.col_offset
        return not text.strip() or text.startswith("#") or is_further_out

    def _free_name(
        self, function: Scope, wanted: Sequence[str], taken: Collection[str]
    ) -> str | None:
        """The first of some names that is no word of a function, nor what new text calls."""
        text = self._source.text
        if isinstance(function.node, ast.stmt):  # and no script
            begin, end = self._source.extent(function.node)
            text = text[begin:end]
        taken = {*taken, *self._called}
        free = (n for n in wanted if n not in taken and not re.search(rf"\b{n}\b", text))
        return next(free, None)


def _is_annotated(node: FunctionNode) -> bool:
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


def _further_in(function: Scope, members: Iterable[Decision | Passing]) -> Iterator[Scope]:
    """The scopes in a function around some places in it."""
    for each in members:
        scope = (each.located if isinstance(each, Decision) else each.reference).use.scope
        while scope is not function and scope.parent is not None:
            yield scope
            scope = scope.parent
