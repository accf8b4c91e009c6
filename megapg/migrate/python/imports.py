"""The imports of a file that is rewritten: what its new text needs, and what nothing needs now."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megapg.migrate.migration import Edit
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.insert import newline_of
from megapg.migrate.python.methods import first_line, is_docstring, kept
from megapg.migrate.python.scopes import FunctionNode, Imported, Use, bound_name, walk
from megapg.migrate.python.sorting import Order, Placed, placed
from megapg.migrate.python.source import Source
from megapg.migrate.python.unused import Import, Removed, Unused


class Origin(NamedTuple):
    """Where something is imported from."""

    name: str  # what it is called unless that is taken
    bound_to: tuple[tuple[str, ...], str]  # the module, with dots in front as a part, and a member
    statement: str  # the import


class Runtime(NamedTuple):
    """What the new text of a file calls."""

    resolving: Origin  # has resolve(), groups_of() and the class of collections
    getters: Origin  # has what no field holds


MEGAPG = Runtime(
    Origin("megapg", (("megapg",), ""), "import megapg"),
    Origin("getters", (("megapg", "megatron"), "getters"), "from megapg.megatron import getters"),
)


@dataclass
class Imports:
    """The names by which a file's new text calls what it is rewritten to."""

    source: Source  # the file
    analysis: Analysis  # its scopes
    order: Order  # how its imports are sorted, if they are
    is_sorted: bool = False  # whether the project says so
    is_linted: bool = False  # whether it has a linter that tells of imports for nothing
    runtime: Runtime = MEGAPG  # what it calls
    # The import statements that its new text needs.
    wanted: dict[str, None] = field(default_factory=dict)
    _wants_partial: bool = False  # of the functools that it takes other names from

    def megapg(self) -> str:
        """The name of what resolves; there is an import of it from now on."""
        return self._name(*self.runtime.resolving)

    def getters(self) -> str:
        """The name of what has the getters, likewise."""
        return self._name(*self.runtime.getters)

    def partial(self) -> str:
        """What ``functools.partial`` is called, likewise."""
        if self._is_imported("partial", (("functools",), "partial")):
            return "partial"
        if _from_functools(self.source) is not None and "partial" not in self._names:
            self._wants_partial = True
            return "partial"
        return self._name("functools", (("functools",), ""), "import functools") + ".partial"

    @cached_property
    def _unused(self) -> Unused:
        return Unused(self.source, self.analysis)

    def module(self, *parts: str) -> str:
        """The name of a module of a package, likewise."""
        *package, name = parts
        statement = f"from {'.'.join(package)} import {name}"
        return self._name(name, (tuple(package), name), statement)

    def _name(self, name: str, bound_to: tuple[tuple[str, ...], str], statement: str) -> str:
        called, needed = self._new_name(name, bound_to, statement)
        if needed:
            self.wanted[needed] = None
        return called

    @kept
    def _new_name(
        self, name: str, bound_to: tuple[tuple[str, ...], str], statement: str
    ) -> tuple[str, str]:
        """What something is called, and the import for that; none where there is one."""
        if self._is_imported(name, bound_to):
            return name, ""
        if name in self.source.text and name in self._names:
            name = next(n for n in (f"_{name}", f"{name}_", f"_{name}_") if n not in self._names)
            statement = f"{statement} as {name}"
        return name, statement

    def _is_imported(self, name: str, bound_to: tuple[tuple[str, ...], str]) -> bool:
        """Whether it means that wherever it is used: imported at the top, and bound to nothing
        else anywhere.
        """
        bound = self.analysis.module.bindings.get(name)
        if not bound or name in self._bound_elsewhere:
            return False
        lines = {
            each.lineno
            for each in self.source.tree.body
            if isinstance(each, ast.Import | ast.ImportFrom)
        }
        return all(
            isinstance(at, Imported)
            and ((*filter(None, ["." * at.level]), *at.module), at.member) == bound_to
            and at.line in lines
            for at in bound
        )

    @cached_property
    def _bound_elsewhere(self) -> set[str]:
        """Parameters, variables, and whatever else is bound by other than an import at the top."""
        top = set(map(id, self.source.tree.body))
        found: set[str] = set()
        for node in walk(self.source.tree):
            if isinstance(node, ast.Name):
                if not isinstance(node.ctx, ast.Load):
                    found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                if id(node) not in top:
                    found |= set(map(bound_name, node.names))
            elif not isinstance(node, ast.alias):
                names = (getattr(node, "name", None), getattr(node, "rest", None))
                found |= {name for name in names if isinstance(name, str)}
        return found

    @cached_property
    def _names(self) -> set[str]:
        """Every name that means something in the file, wherever."""
        found = set(dir(builtins))
        for node in walk(self.source.tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.alias):
                found.add(bound_name(node))
            elif isinstance(node, ast.Global | ast.Nonlocal):
                found |= set(node.names)
            else:
                found |= {str(getattr(node, name, "")) for name in ("name", "rest")}
        return found

    def removed(self, gone: Collection[Use], kept: Collection[str]) -> list[Removed]:
        """What goes, as :meth:`edits` has it where nothing has to stay."""
        return list(self._unused.statements(set(gone), kept))

    def edits(
        self,
        gone: Collection[Use],
        kept: Collection[str],
        staying: Collection[tuple[int, str]] = (),
    ) -> list[Edit]:
        """The edits that add what is wanted and remove what is used no more.

        Args:
            gone: the uses that are not in the new text.
            kept: names that others take from this module.
            staying: the lines of imports that stay, each with a name that it still imports.
        """
        found, lines = self.removed(gone, kept), {line for line, _ in staying}
        left = [edit for each in found for edit in self._unused.staying(each, staying)]
        removed = [each for each in found if each[0].lineno not in lines]
        excused = list(self._unused.excused(set(gone), kept)) if self.is_linted else []
        # `import x` before `from x import`, as sorters of imports have it.
        wanted = sorted(self.wanted, key=lambda each: (each.startswith("from "), each))
        edits = excused + (_with_partial(self.source) if self._wants_partial else [])
        for statement, names in removed:
            if names is not None:
                edits += self._unused.without(statement, names, self.order.joined)
        whole = self._unused.leaving_no_block_empty(
            [each for each, names in removed if names is None]
        )
        if self._has_order():
            leading = self._leading()
            new = [each for each in ast.parse("\n".join(wanted)).body if isinstance(each, Import)]
            for stretch in placed(leading, [e for e in whole if e in leading], new, self.order):
                edits += self._stretch(stretch)
            edits += [self._removal(each, "") for each in whole if each not in leading]
            return edits + left
        added = newline_of(self.source).join(wanted)
        for statement in whole:
            put = ""
            if added and any(statement is each for each in self._leading()):
                put, added = added + newline_of(self.source), ""
            edits.append(self._removal(statement, put))
        if added:
            edits.append(self._addition(added))
        return edits + left

    def replace(self, imported: Imported, name: str, statement: str) -> bool:
        """Have a statement at the top import a name in place of the one that does; False where
        that one has to stay.
        """
        self._unused.replaced.add((imported.line, name))
        going = any(
            each in self._leading() and each.lineno == imported.line
            for each, _ in self._unused.statements(set(), ())
        )
        if going:
            self.wanted[statement] = None
        else:
            self._unused.replaced.discard((imported.line, name))
        return going

    def drops(self, name: str, gone: Collection[Use], kept: Collection[str]) -> bool:
        """Whether the import of a name goes with some uses."""
        return any(
            name in (names if names is not None else map(bound_name, statement.names))
            for statement, names in self._unused.statements(set(gone), kept)
        )

    # -- in order ----------------------------------------------------------------------------

    def _has_order(self) -> bool:
        """Whether the imports at the top are to be in order, each with its lines for itself."""
        leading = self._leading()
        alone = all(map(self._is_alone, leading))
        return bool(leading) and alone and (self.is_sorted or self.order.is_shown_by(leading))

    def _is_alone(self, statement: ast.stmt) -> bool:
        """Whether no other statement is on its lines."""
        begin, end = self.source.lines(statement)
        before = self.source.text[begin : self.source.extent(statement)[0]]
        behind = self.source.text[self.source.end(statement) : end].partition("#")[0]
        return ";" not in before + behind

    def _stretch(self, at: Placed) -> list[Edit]:
        """The edits between two imports that stay."""
        newline, text = newline_of(self.source), self.source.text
        lines = list(map(self.source.lines, at.gone))
        start = self.source.lines(at.before)[1] if at.before else 0
        stop = self.source.lines(at.behind)[0] if at.behind else 0
        begin = start if at.before else lines[0][0] if lines else stop
        end = stop if at.behind else lines[-1][1] if lines else start
        apart = self.order.blank_lines
        new = "" if text[:begin].endswith(("\n", "\r", "")) else newline
        for one, other in zip((at.before, *at.come), (*at.come, None), strict=True):
            if one is not None and other is not None:
                new += newline * apart(one, other)
            new += ast.unparse(other) + newline if other is not None else ""
        edges = [begin, *(edge for line in lines for edge in line), end]
        gaps = [text[one:other] for one, other in zip(edges[::2], edges[1::2], strict=True)]
        if "".join(gaps).strip():  # comments, which stay
            removals = [self._removal(each, "") for each in at.gone]
            if not new:
                return removals
            if at.before is not None and apart(at.before, at.come[0]) == 0:
                return [Edit(begin, begin, new, "import"), *removals]
            if at.behind is not None:
                new = new.lstrip("\r\n") + newline * apart(at.come[-1], at.behind)
                end = self._above(at.behind)
            return [Edit(end, end, new, "import"), *removals]
        if at.come and at.behind is not None:
            new += newline * apart(at.come[-1], at.behind)
        elif at.before is not None and at.behind is not None:
            new = max(gaps, key=len)
        if at.gone or end == begin:
            return [Edit(begin, end, new, "import")]
        gap = text[begin:end]
        if new.endswith(gap):
            return [Edit(begin, begin, new.removesuffix(gap), "import")]
        if new.startswith(gap):
            return [Edit(end, end, new.removeprefix(gap), "import")]
        return [Edit(begin, end, new, "import")]

    def _above(self, statement: ast.stmt) -> int:
        """Where the comments above a statement begin that belong to it."""
        line = statement.lineno
        while line > 1 and self.source.line_text(line - 1).lstrip().startswith("#"):
            line -= 1
        return self.source.line_starts[line - 1]

    def _removal(self, statement: ast.stmt, put: str) -> Edit:
        begin, end = self.source.lines(statement)
        return Edit(begin, end if put else self._with_blank_line(begin, end), put, "import")

    # -- adding ------------------------------------------------------------------------------

    @kept
    def _leading(self) -> list[ast.stmt]:
        """The first imports in a row that are of more than the standard library; where there are
        none, those with which the module begins. What is between the two may be there to run before
        anything heavy is imported.
        """
        rows: list[list[ast.stmt]] = [[]]
        for index, statement in enumerate(self.source.tree.body):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                rows[-1].append(statement)
            elif not (index == 0 and is_docstring(statement)):
                rows.append([])
        return next((each for each in rows if any(map(self._is_of_others, each))), rows[0])

    def _is_of_others(self, statement: ast.stmt) -> bool:
        modules = statement.names if isinstance(statement, ast.Import) else ()
        named = {each.name for each in modules}
        if isinstance(statement, ast.ImportFrom):
            named = {"." * statement.level + (statement.module or "")}
        return not all(each.partition(".")[0] in sys.stdlib_module_names for each in named)

    def _addition(self, new: str) -> Edit:
        source, newline = self.source, newline_of(self.source)
        leading, body = self._leading(), source.tree.body
        after = leading[-1] if leading else None
        if after is None and body and is_docstring(body[0]):
            after = body[0]
        at, lead = self.source.end_of_line(after) if after is not None else len(source.text), ""
        if after is not None and ";" not in source.text[self.source.end(after) : at]:
            lead = "" if source.text[:at].endswith(("\n", "\r")) else newline
        elif after is not None or body:
            at = source.line_starts[first_line(after or body[0]) - 1]
        behind = body[1:] if after is not None else body
        if leading or not behind:
            return Edit(at, at, f"{lead}{new}{newline}", "import")
        # The first import of a file stands alone, as formatters have it.
        lead += newline if after is not None else ""
        text = source.text[at:]
        blank = text[: len(text) - len(text.lstrip())].count(newline)
        wanted = 2 if isinstance(behind[0], FunctionNode | ast.ClassDef) else 1
        rest = newline * max(0, wanted - blank)
        return Edit(at, at, f"{lead}{new}{newline}{rest}", "import")

    def _with_blank_line(self, begin: int, end: int) -> int:
        """The end of what is removed: with the blank line behind an import that opens a block, or
        has one above it.
        """
        before, rest = self.source.text[:begin], self.source.text[end:]
        blank = re.match(r"[ \t]*(?:\r\n|\r|\n)", rest)
        is_apart = re.search(r"(?:\r\n|\r|\n)[ \t]*(?:\r\n|\r|\n)\Z", before[-200:])
        return end + blank.end() if blank and (is_apart or before.rstrip().endswith(":")) else end


def _from_functools(source: Source) -> ast.ImportFrom | None:
    """The first statement at the top that takes names from functools."""
    statements = (each for each in source.tree.body if isinstance(each, ast.ImportFrom))
    of_it = (each for each in statements if (each.module, each.level) == ("functools", 0))
    return next((each for each in of_it if each.names[0].name != "*"), None)


def _with_partial(source: Source) -> list[Edit]:
    """The edit that takes ``partial`` as well where other names are, in their order."""
    statement = _from_functools(source)
    if statement is None:
        return []
    behind = next((each for each in statement.names if each.name > "partial"), None)
    begin, end = source.extent(behind or statement.names[-1])
    at, text = (begin, "partial, ") if behind else (end, ", partial")
    return [Edit(at, at, text, "import")]
