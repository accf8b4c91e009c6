"""Where something is added to a file: a parameter, an argument, a statement.

New text follows the layout around it: one line for what is on one line, a line of its own where
each neighbour has one, with the file's newlines. Comments stay with what they are about.
"""

from __future__ import annotations

import ast
import re
import tokenize
from bisect import bisect_right
from dataclasses import dataclass

from megapg.migrate.migration import Edit
from megapg.migrate.python.methods import first_line, kept
from megapg.migrate.python.scopes import FunctionNode
from megapg.migrate.python.source import Source, tokens

# Behind a statement, where nothing else follows.
_REST_OF_LINE = re.compile(r"[ \t\f]*(?:#[^\r\n]*)?(?=[\r\n]|\Z)")
_WIDTH = 88  # of a line, where the project says nothing
_PASSED_OVER = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE})


@dataclass(frozen=True)
class _List:
    """What is between two parentheses: where it begins and ends, its last item and token."""

    opened: int
    closed: int
    item: int  # where the last item begins
    last: str
    start: int
    stop: int


def add_parameter(
    source: Source,
    node: FunctionNode,
    parameter: str,
    *,
    by_place: bool = False,
    width: int | None = None,
) -> list[Edit]:
    """Edits that add a parameter behind the others; none where that can't be done.

    Args:
        source: the file.
        node: a function without ``**kwargs``.
        parameter: as it is to be written, such as ``x=None``.
        by_place: whether it can be passed without its name; the function has none that can't.
        width: up to which a line with all of them may grow.
    """
    arguments = node.args
    has_star = arguments.vararg is not None or bool(arguments.kwonlyargs)
    return _append(
        source,
        source.index(node.lineno, node.col_offset),
        [parameter] if has_star or by_place else ["*", parameter],
        "parameter",
        width,
    )


def add_argument(
    source: Source, call: ast.Call, argument: str, width: int | None = None
) -> list[Edit]:
    """Edits that add an argument behind the others of a call; none where that can't be done."""
    if len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.GeneratorExp):
        return []  # it would need parentheses of its own
    _, end = source.extent(call.func)
    return _append(source, end, [argument], "argument", width)


@kept
def can_be_given(call: ast.Call, source: Source) -> bool:
    """Whether an argument can be added behind the others of a call."""
    return bool(add_argument(source, call, ""))


def add_statement(
    source: Source, before: ast.stmt, statement: str, *, over_comment: bool = False
) -> Edit | None:
    """The edit that puts a statement on a line of its own before another one; None where that
    does not begin its line.

    Args:
        source: the file.
        before: the other one.
        statement: what is put there.
        over_comment: whether the comment above the other one is about that alone.
    """
    first = first_line(before)
    begin = source.line_starts[first - 1]
    at = begin + len(source.line_text(first)) - len(source.line_text(first).lstrip(" \t\f"))
    indent = source.text[begin:at]
    expected = source.index(before.lineno, before.col_offset)
    if first == before.lineno and at != expected:
        return None
    if source.text[at:].startswith("elif") and isinstance(before, ast.If):
        return None
    if begin and source.text[:begin].rstrip("\r\n").endswith("\\"):
        return None
    while over_comment and first > 1 and _is_comment(source, first - 1, indent):
        first -= 1
    begin = source.line_starts[first - 1]
    return Edit(begin, begin, f"{indent}{statement}{newline_of(source)}", "statement")


def _is_comment(source: Source, line: int, indent: str) -> bool:
    return source.line_text(line).startswith(f"{indent}#") and line not in source.lines_of_strings


def add_behind(source: Source, statement: ast.stmt, added: str) -> Edit | None:
    """The edit that puts a statement on a line of its own behind another one; None where that does
    not have its lines for itself.
    """
    before = add_statement(source, statement, "")
    end = source.index(statement.end_lineno or 0, statement.end_col_offset or 0)
    rest = _REST_OF_LINE.match(source.text, end)
    if before is None or rest is None:
        return None
    begin = source.index(statement.lineno, statement.col_offset)
    indent = source.text[before.start : begin]
    at = rest.end()
    return Edit(at, at, newline_of(source) + indent + added, "statement")


def newline_of(source: Source) -> str:
    """How the file ends its lines."""
    first = source.line_text(1)
    return "\r\n" if first.endswith("\r\n") else "\r" if first.endswith("\r") else "\n"


def _append(
    source: Source, begin: int, items: list[str], what: str, width: int | None
) -> list[Edit]:
    try:
        found = _parenthesised(source.text, begin)
    except (tokenize.TokenError, SyntaxError, IndexError):
        found = None
    if found is None:
        return []
    text, stop = source.text, found.stop
    if stop == found.opened:  # nothing between the parentheses
        return [Edit(stop, stop, ", ".join(items), what)]
    has_comma = found.last == ","
    if "\n" not in text[stop : found.closed] and "\r" not in text[stop : found.closed]:
        own = _indent_of_own_line(source, found)
        if own and not has_comma:
            return [
                Edit(stop, stop, "".join(f",{newline_of(source)}{own}{e}" for e in items), what)
            ]
        joint = " " if has_comma else ", "
        return [Edit(stop, stop, joint + ", ".join(items), what)]
    newline = newline_of(source)
    end_of_line = min(at for at in (text.find("\n", stop), text.find("\r", stop)) if at >= 0)
    begin_of_line = source.line_starts[bisect_right(source.line_starts, stop - 1) - 1]
    together = ", ".join(["", *items])
    if (
        not has_comma
        and found.opened <= begin_of_line
        and not text[found.opened : begin_of_line].strip()
        and not text[stop:end_of_line].strip()  # a comment
        and stop - begin_of_line + len(together) <= (width or _WIDTH)
    ):
        return [Edit(stop, stop, together, what)]
    indent = newline + _indent(source, found)
    lines = (",").join(indent + item for item in items)
    if has_comma:
        return [Edit(end_of_line, end_of_line, lines + ",", what)]
    if text[stop:end_of_line].strip():  # a comment, which stays with its line
        return [Edit(stop, stop, ",", what), Edit(end_of_line, end_of_line, lines, what)]
    return [Edit(stop, stop, "," + lines, what)]


def _indent_of_own_line(source: Source, found: _List) -> str:
    """The indentation of the last item, where it begins a line behind that of the parenthesis."""
    begin = source.line_starts[bisect_right(source.line_starts, found.item) - 1]
    indent = source.text[begin : found.item]
    return indent if begin > found.opened and not indent.strip(" \t\f") else ""


def _indent(source: Source, found: _List) -> str:
    """The indentation of the first item that begins a line; else a level more than the line's."""
    text = source.text
    starts = [at for at in source.line_starts if found.opened <= at <= found.start]
    for start in starts:
        line = text[start : found.stop]
        stripped = line.lstrip(" \t\f")
        if stripped and stripped[0] not in "#\r\n":
            return line[: len(line) - len(stripped)]
    begin = max(at for at in source.line_starts if at <= found.opened)
    line = text[begin : found.opened]
    return line[: len(line) - len(line.lstrip(" \t\f"))] + "    "


def _parenthesised(text: str, begin: int) -> _List | None:
    """The first pair of parentheses from an index on: of a signature, or of a call."""
    opened, depth, in_strings, comma_at = -1, 0, 0, -1
    item, last = -1, ("", -1, -1)
    for token, start, stop in tokens(text, begin):
        name = tokenize.tok_name[token.type]
        in_strings += name.endswith("STRING_START") - name.endswith("STRING_END")
        if token.type in _PASSED_OVER or in_strings:
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0)
        depth = max(depth, 0)  # the function may be in parentheses itself
        if opened < 0:
            if token.string == "(" and depth == 1:  # deeper: among the parameters of types
                opened, last = stop, (token.string, start, stop)
        elif depth == 0:
            return _List(opened, start, item, *last)
        else:
            if last[1] < opened or (last[0] == "," and comma_at == last[1]):
                item = start
            if token.string == "," and depth == 1:
                comma_at = start
            last = (token.string, start, stop)
    return None
