"""Statements that were rewritten, laid out as the project's formatter lays them out.

That is done where it is certain: the layout of the statement before is what the formatter's rules
say. Where a project has no formatter, a statement of one line is wrapped if it has become longer
than the project, or anybody, has lines.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megapg.migrate.edit.style import Style
from megapg.migrate.migration import Edit, applied
from megapg.migrate.python.flow import blocks
from megapg.migrate.python.insert import newline_of
from megapg.migrate.python.layout import laid_out
from megapg.migrate.python.logical import Statement, Unsure, read
from megapg.migrate.python.methods import kept
from megapg.migrate.python.source import Source

# What nobody leaves on one line, where a project says nothing about its lines.
_LONG = 120
_GROWS = frozenset({"argument", "gradient", "parameter", "statement"})


@kept
def relaid(source: Source, edits: tuple[Edit, ...], style: Style) -> list[Edit]:
    """Edits with what lays the statements around them out, in the order of the file.

    Args:
        source: the file.
        edits: of it, in its order.
        style: how the project wants it written.
    """
    return _Relayout(source, edits, style, style.line_length or _LONG).edits()


@dataclass(frozen=True)
class _Change:
    """Space between two tokens of the new text that becomes another."""

    begin: int
    end: int
    new: str


def _gaps(statement: Statement) -> list[str]:
    """The space between its tokens."""
    places = (statement.gap(number) for number in range(1, len(statement.kept) + 1))
    return [statement.text[start:stop] for start, stop in places]


class _Relayout:
    """Finds what changes, and puts it into the edits or beside them."""

    def __init__(self, source: Source, edits: Sequence[Edit], style: Style, width: int) -> None:
        self._source, self._edits, self._style, self._width = source, edits, style, width
        self._text = applied(source.text, edits)
        self._spans: list[tuple[int, int]] = []
        shift = 0
        for edit in edits:
            start = edit.start + shift
            self._spans.append((start, start + len(edit.new)))
            shift += len(edit.new) - (edit.stop - edit.start)

    def edits(self) -> list[Edit]:
        changes: list[_Change] = []
        seen: set[int] = set()
        for number, edit in enumerate(self._edits):
            if edit.what in ("import", "docstring"):
                continue
            old = None if edit.what == "statement" else self._statement_at(edit.start)
            if edit.what == "statement":
                begin = self._spans[number][0] + len(edit.new) - len(edit.new.lstrip())
            elif old is None:
                continue
            else:
                begin = self._moved(old)
            if begin not in seen:
                seen.add(begin)
                changes += self._changes(old, begin)
        return self._merged(sorted(changes, key=lambda each: each.begin))

    # -- what changes ------------------------------------------------------------------------

    def _statement_at(self, place: int) -> int | None:
        """Where the innermost statement around a place begins, or the one whose head that is in."""
        begins, number = self._begins, bisect_right(self._begins, place) - 1
        begin = begins[number] if number >= 0 else None
        while begin is not None and self._statements[begin][0] <= place:
            begin = self._statements[begin][1]
        return begin

    @cached_property
    def _begins(self) -> list[int]:
        return sorted(self._statements)

    @cached_property
    def _statements(self) -> Mapping[int, tuple[int, int | None]]:
        """Of each statement, by where it begins, its end and where the one around it begins."""
        found: dict[int, tuple[int, int | None]] = {}
        waiting: list[tuple[ast.AST, int | None]] = [(self._source.tree, None)]
        while waiting:
            node, around = waiting.pop()
            for each in (statement for block in blocks(node) for statement in block):
                begin = self._source.index(each.lineno, each.col_offset)
                end = self._source.index(each.end_lineno or 0, each.end_col_offset or 0)
                found[begin] = end, around
                waiting.append((each, begin))
        return found

    def _changes(self, old: int | None, begin: int) -> list[_Change]:
        newline, magic = newline_of(self._source), self._style.magic_comma
        try:
            new = read(self._text, begin, magic_comma=magic)
            if old is not None:
                before = read(self._source.text, old, magic_comma=magic)
                if not self._is_certain(before, new, newline):
                    return []
            gaps = self._laid_out(new, newline)
        except Unsure:
            return []
        places = [new.gap(number) for number in range(1, len(new.kept) + 1)]
        return [
            _Change(start, stop, gap)
            for (start, stop), gap in zip(places, gaps, strict=True)
            if self._text[start:stop] != gap
        ]

    def _is_certain(self, old: Statement, new: Statement, newline: str) -> bool:
        if self._style.is_formatted:
            return _gaps(old) == self._laid_out(old, newline)
        is_one_line = newline not in "".join(_gaps(new))
        return is_one_line and self._length(old) <= self._width < self._length(new)

    def _laid_out(self, statement: Statement, newline: str) -> list[str]:
        splits = self._style.splits_message
        return laid_out(statement, self._width, newline, splits_message=splits)

    def _length(self, statement: Statement) -> int:
        """The length of the longest line."""
        first = statement.kept[0].start - len(statement.indent)
        return max(map(len, re.split(r"\r\n|\r|\n", statement.text[first : statement.stop])))

    def _moved(self, place: int) -> int:
        """Where in the new text something is that no edit changes."""
        number = bisect_right(self._edits, place, key=lambda each: each.stop) - 1
        if number >= 0 and self._edits[number].start == place:
            number -= 1  # it is behind the place
        if number < 0:
            return place
        return place - self._edits[number].stop + self._spans[number][1]

    # -- putting it in -----------------------------------------------------------------------

    def _merged(self, changes: Sequence[_Change]) -> list[Edit]:
        within: dict[int, list[_Change]] = {}
        found: list[Edit] = []
        for change in changes:
            number = self._around(change)
            if number is not None:
                within.setdefault(number, []).append(change)
                continue
            start, stop = self._before(change.begin), self._before(change.end)
            found.append(Edit(start, stop, change.new, "layout"))
        for number, edit in enumerate(self._edits):
            found.append(self._widened(number, within[number]) if number in within else edit)
        return sorted(found, key=lambda each: (each.start, each.stop))

    def _around(self, change: _Change) -> int | None:
        """The edit that a change is to be a part of: it is in its text, or where it adds some."""
        first = bisect_left(self._spans, change.begin, key=lambda each: each[1])
        for number in range(first, len(self._spans)):
            begin, end = self._spans[number]
            if begin > change.end:
                break
            if self._edits[number].what in _GROWS:
                if begin <= change.end and change.begin <= end:
                    return number
            elif begin < change.end and change.begin < end:
                return number
        return None

    def _before(self, place: int) -> int:
        """Where in the old text a place of the new one is that is in no edit."""
        number = bisect_right(self._spans, place, key=lambda each: each[1]) - 1
        if number < 0:
            return place
        return place - self._spans[number][1] + self._edits[number].stop

    def _widened(self, number: int, changes: Sequence[_Change]) -> Edit:
        edit, (start, stop) = self._edits[number], self._spans[number]
        begin = min(start, *(each.begin for each in changes), start)
        end = max(stop, *(each.end for each in changes), stop)
        pieces, at = [], begin
        for each in changes:
            pieces += [self._text[at : each.begin], each.new]
            at = each.end
        pieces.append(self._text[at:end])
        return Edit(
            edit.start - (start - begin), edit.stop + end - stop, "".join(pieces), edit.what
        )
