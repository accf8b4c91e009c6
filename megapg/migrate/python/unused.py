"""The imports that nothing needs any more, and what takes them out of a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from megapg.migrate.migration import EXCUSE, WHY_UNUSED, Edit
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.flow import blocks, statements_in
from megapg.migrate.python.insert import newline_of
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import FunctionNode, Imported, Use, bound_name, last_name, scopes
from megapg.migrate.python.source import Source

_DELIBERATE = re.compile(r"#\s*(?:noqa|megapg:\s*keep|isort:|pylint:)")
Import: TypeAlias = ast.Import | ast.ImportFrom
Removed: TypeAlias = tuple[Import, list[str] | None]
"""A statement with the names that go from it; None for all of them."""
FOR_TYPES = "TYPE_CHECKING"
"""What is true for a type checker alone."""
_NOTICING_IMPORTS = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@dataclass
class Unused:
    """The imports of a file that go."""

    source: Source  # the file
    analysis: Analysis  # its scopes
    # The names that it gets from elsewhere, each with the line of its import.
    replaced: set[tuple[int, str]] = field(default_factory=set)

    def statements(self, gone: set[Use], kept: Collection[str]) -> Iterator[Removed]:
        """Statements with the names to take out of each."""
        if "*" in kept:
            return
        plain = list(self._plain(gone))
        lines = {each.lineno for each in plain}
        unused = set(self.replaced)
        for name, at in self._idle(gone, kept):
            if lines.issuperset(each.line for each in at):
                unused |= {(each.line, name) for each in at}
        for statement in plain:
            names = list(map(bound_name, statement.names))
            out = [name for name in names if (statement.lineno, name) in unused]
            begin, end = self.source.lines(statement)
            if not out or _DELIBERATE.search(self.source.text[begin:end]):
                continue
            if len(out) < len(names):
                yield statement, out
                continue
            start = self.source.index(statement.lineno, statement.col_offset)
            alone = not self.source.text[begin:start].strip(" \t\f")
            if alone and ";" not in self.source.text[self.source.end(statement) : end]:
                yield statement, None  # with its comment

    def leaving_no_block_empty(self, statements: list[Import]) -> list[Import]:
        """Those of some imports that can go, where no block goes with them."""
        blocks = [each.body for each in self.analysis.module.nodes if isinstance(each, ast.If)]
        emptied = [block for block in blocks if all(each in statements for each in block)]
        return [each for each in statements if not any(each in block for block in emptied)]

    def excused(self, gone: set[Use], kept: Collection[str]) -> Iterator[Edit]:
        """A comment for the linter at imports that fail where something is not there, and that is
        all that they are for now.
        """
        idle = {(each.line, name) for name, at in self._idle(gone, kept) for each in at}
        plain = set(self._plain(gone))
        for each in self.analysis.module.nodes:
            if isinstance(each, ast.Import | ast.ImportFrom) and each not in plain:
                end = self.source.end(each)
                alone = not self.source.text[end : self.source.end_of_line(each)].strip()
                here = {(each.lineno, bound_name(name)) for name in each.names}
                if alone and each.lineno == each.end_lineno and not here.isdisjoint(idle):
                    yield Edit(end, end, EXCUSE, "excuse")

    def staying(self, removed: Removed, staying: Collection[tuple[int, str]]) -> Iterator[Edit]:
        """Edits that leave of an import what circular imports need, and say so: that are the lines
        of imports, each with a name. Where names that are in use stay with it, all do.
        """
        statement, names = removed
        needed = {name for line, name in staying if line == statement.lineno}
        if not needed:
            return
        text, start = self.source.text, self.source.extent(statement)[0]
        begin = self.source.line_starts[statement.lineno - 1]
        if not text[begin:start].strip(" \t\f"):
            why = f"{text[begin:start]}{WHY_UNUSED}{newline_of(self.source)}"
            yield Edit(begin, begin, why, "excuse")
        if names is None:
            left = [each for each in statement.names if bound_name(each) in needed]
            if len(left) < len(statement.names) or statement.lineno != statement.end_lineno:
                new = ast.unparse(with_names(statement, left))
                yield Edit(*self.source.extent(statement), new, "import")
            ends = {self.source.end(statement)}
        else:
            out = [each for each in statement.names if bound_name(each) in names]
            ends = {self._end_of_line(each.end_lineno or 0, statement) for each in out}
        yield from (Edit(end, end, EXCUSE, "excuse") for end in sorted(ends))

    def _end_of_line(self, line: int, statement: Import) -> int:
        """The index behind what is no comment on a line of an import; behind the import where a
        backslash is the last on that line.
        """
        code = self.source.line_text(line).partition("#")[0].rstrip()
        if code.endswith("\\"):
            return self.source.end(statement)
        return self.source.line_starts[line - 1] + len(code)

    def _plain(self, gone: set[Use]) -> Iterator[Import]:
        """Imports that nothing would miss, in any order."""
        yield from _plain_imports(self.source.tree)
        for each in self.analysis.module.nodes:
            if isinstance(each, ast.Try) and all(map(_catches_all, each.handlers)):
                last = each.body[-1].end_lineno or 0
                for statement in _imports_within(each.body):
                    names = list(map(bound_name, statement.names))
                    if all(
                        statement.lineno < use.node.lineno <= last
                        for use in gone
                        if use.root in names and self._is_bound_by(use, statement)
                    ):
                        yield statement  # what is written fails in the same place

    def _is_bound_by(self, use: Use, statement: Import) -> bool:
        found = use.scope.find(use.root or "")
        bound = found[1] if found else ()
        return any(isinstance(e, Imported) and e.line == statement.lineno for e in bound)

    def _idle(self, gone: set[Use], kept: Collection[str]) -> Iterator[tuple[str, list[Imported]]]:
        """The names that lose their last use and nothing else needs, with their imports."""
        names = names_of(gone)
        left: set[tuple[int, str]] = set()
        went: set[tuple[int, str]] = set()
        for use in self.analysis.uses:
            if use.root in names and (found := use.scope.find(use.root)):
                (went if use in gone else left).add((id(found[0]), use.root))
        deleted = self.analysis.deleted
        for scope in scopes(self.analysis.module):
            for name, bindings in scope.bindings.items():
                key = (id(scope), name)
                if key in left or key not in went or name in deleted:
                    continue
                if scope.kind == "class":  # it is an attribute as well
                    continue
                if scope is self.analysis.module and (name in kept or self._exported(name)):
                    continue
                if isinstance(bindings[0], Imported):
                    yield name, [each for each in bindings if isinstance(each, Imported)]

    def _exported(self, name: str) -> bool:
        if "__all__" not in self.analysis.module.bindings:
            return self.source.path.stem == "__init__"  # others import from it what it imports
        return re.search(rf"[\"']{re.escape(name)}[\"']", self.source.text) is not None

    def without(self, statement: Import, out: list[str], width: int) -> Iterator[Edit]:
        """Edits that take some names out of an import and leave others; on one line of some width
        if they fit, where that is not 0.
        """
        names = statement.names
        text = self.source.text[slice(*self.source.extent(statement))]
        if width and "\n" in text and "(" in text and "#" not in text:
            left = [each for each in names if bound_name(each) not in out]
            line = text[: text.index("(")] + ", ".join(map(ast.unparse, left))
            if statement.col_offset + len(line) <= width:
                yield Edit(*self.source.extent(statement), line, "import")
                return
        places = [
            (
                self.source.index(each.lineno, each.col_offset),
                self.source.index(each.end_lineno or 0, each.end_col_offset or 0),
            )
            for each in names
        ]
        stays = [bound_name(each) not in out for each in names]
        last = max(i for i, here in enumerate(stays) if here)
        for i, here in enumerate(stays):
            if not here and i < last:
                yield Edit(places[i][0], places[i + 1][0], "", "import")
        if last < len(names) - 1:
            begin, end = places[last][1], places[-1][1]
            lines = self.source.end_of_line(names[last]), self.source.end_of_line(names[-1])
            rest = self.source.text[end : lines[1]]
            own = names[last].lineno < names[last + 1].lineno  # a line each, with its comment
            if own and re.fullmatch(r",\s*(#.*)?\s*", rest):
                begin, end = lines
            yield Edit(begin, end, "", "import")


def with_names(statement: Import, names: list[ast.alias]) -> Import:
    """An import like another one, of other names."""
    if isinstance(statement, ast.Import):
        return ast.Import(names)
    return ast.ImportFrom(statement.module, names, statement.level)


def names_of(uses: Iterable[Use]) -> set[str]:
    """The names with which some uses begin."""
    return {use.root for use in uses if use.root}


@kept
def _plain_imports(tree: ast.Module) -> list[Import]:
    """Imports that run whenever what is around them does, with other statements beside them."""
    return list(_find_plain_imports(tree))


def _find_plain_imports(tree: ast.Module) -> Iterator[Import]:
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        outer, in_function = waiting.pop()
        for block in blocks(outer):
            for statement in block:
                if isinstance(statement, Import):
                    if not all(isinstance(each, Import) for each in block):
                        yield statement
                elif not isinstance(statement, ast.Try | ast.If):
                    waiting.append((statement, in_function or isinstance(statement, FunctionNode)))
                elif in_function and not notices_imports(statement):
                    waiting.append((statement, True))
                elif isinstance(statement, ast.If) and last_name(statement.test) != FOR_TYPES:
                    waiting.append((statement, False))
                else:
                    inner = list(statements_in(statement))
                    waiting += [(e, True) for e in inner if isinstance(e, FunctionNode)]
                    waiting += [(e, False) for e in inner if isinstance(e, ast.ClassDef)]
                    yield from _as_good_without(statement)


def notices_imports(statement: ast.Try | ast.If) -> bool:
    """Whether it does something else where an import in it fails."""
    return isinstance(statement, ast.Try) and any(
        each.type is None
        or any(
            last_name(node) in _NOTICING_IMPORTS
            for node in ast.walk(each.type)
            if isinstance(node, ast.expr)
        )
        for each in statement.handlers
    )


def _catches_all(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or last_name(handler.type) in ("Exception", "BaseException")


def _imports_within(block: Sequence[ast.stmt]) -> Iterator[Import]:
    """The imports in a block, and in those in it that no error leaves, with others behind them."""
    yield from (each for each in block[:-1] if isinstance(each, Import))
    for each in block:
        if not isinstance(each, FunctionNode | ast.ClassDef | ast.Try):
            for inner in blocks(each):
                yield from _imports_within(inner)


def _as_good_without(statement: ast.Try | ast.If) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports for a type checker, beside others; and those that are tried together with another one
    of the same package, which fails where they do.
    """
    imports = [each for each in statement.body if isinstance(each, ast.Import | ast.ImportFrom)]
    if isinstance(statement, ast.If):
        if last_name(statement.test) == FOR_TYPES:
            yield from imports
        return
    for each in imports:
        if isinstance(each, ast.ImportFrom) and each.module and not each.level:
            beside = [e for e in imports if isinstance(e, ast.ImportFrom) and e is not each]
            if any(f"{e.module}.".startswith(f"{each.module}.") and not e.level for e in beside):
                yield each
