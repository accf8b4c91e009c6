"""One file as the tool sees it: bytes, text, syntax tree, and where each character lies."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from megapg.migrate.python.methods import kept

# What ends a line for Python: form feeds and the separators of Unicode do not.
_NEWLINE = re.compile(r"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Problem:
    """A file, or a part of the configuration, that could not be read."""

    file: str  # its path, as reports show it
    line: int  # where in it; 0 for the whole
    message: str  # what is wrong, in one line


@dataclass(frozen=True)
class Span:
    """A piece of a file. Lines and columns count from 1, in characters; bytes from 0."""

    line: int  # of the first character
    column: int  # of the first character
    end_line: int  # of the last character
    end_column: int  # behind the last character
    start: int  # byte of the file at which it starts
    stop: int  # byte of the file behind it


def line_starts(text: str) -> list[int]:
    """For each line of a text the index of its first character."""
    if "\r" in text:
        return [0, *(found.end() for found in _NEWLINE.finditer(text))]
    return list(accumulate((len(line) + 1 for line in text.split("\n")[:-1]), initial=0))


class Source:
    """A Python file that parses."""

    def __init__(self, path: Path, name: str, data: bytes, text: str, encoding: str) -> None:
        self.path, self.name, self.data, self.text = path, name, data, text
        self.encoding = encoding
        with warnings.catch_warnings(action="ignore"):  # of invalid escapes: not our business
            self.tree = ast.parse(text)

    @cached_property
    def line_starts(self) -> list[int]:
        """For each line the index of its first character in ``text``."""
        return line_starts(self.text)

    @cached_property
    def _byte_starts(self) -> list[int]:
        starts, at = [], len(self.data) - len(self._encoded(self.text))  # the byte order mark
        if self.encoding == "utf-8" and self.text.isascii():  # most files
            return [at + begin for begin in self.line_starts]
        for line, begin in enumerate(self.line_starts):
            starts.append(at)
            end = self.line_starts[line + 1] if line + 1 < len(self.line_starts) else None
            at += len(self._encoded(self.text[begin:end]))
        return starts

    @cached_property
    def lines_of_strings(self) -> frozenset[int]:
        """The numbers of the lines that strings of several lines are in."""
        return frozenset(
            line
            for each in ast.walk(self.tree)
            if isinstance(each, ast.Constant | ast.JoinedStr) and each.end_lineno != each.lineno
            for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
        )

    def _encoded(self, text: str) -> bytes:
        return text.encode(self.encoding)

    def encoded(self, text: str) -> bytes:
        """The bytes of the file if that were its text: with its mark, in its encoding."""
        mark = self.data[: len(self.data) - len(self._encoded(self.text))]
        return mark + self._encoded(text)

    def line_text(self, line: int) -> str:
        """The line with that number, from 1, with its newline."""
        starts = self.line_starts
        return self.text[starts[line - 1] : starts[line] if line < len(starts) else None]

    def index(self, line: int, utf8_column: int) -> int:
        """Index in ``text`` of a position as the syntax tree gives it."""
        columns = None if self.text.isascii() else self._columns(line)  # this is asked often
        if columns is not None:
            utf8_column = bisect_left(columns, utf8_column)
        return self.line_starts[line - 1] + utf8_column

    @kept
    def _columns(self, line: int) -> list[int] | None:
        """For each character of a line its UTF-8 column; None where the two are the same."""
        text = self.line_text(line)
        ends = accumulate(len(character.encode()) for character in text)
        return None if text.isascii() else [0, *ends]

    def extent(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        """Where something lies in ``text``, as far as the syntax tree knows."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.index(node.lineno, node.col_offset), self.index(end_line, end_column)

    def end(self, node: ast.stmt) -> int:
        """The index behind a statement."""
        return self.index(node.end_lineno or 0, node.end_col_offset or 0)

    def end_of_line(self, node: ast.stmt | ast.alias) -> int:
        """The index behind the line in which something ends, and its newline."""
        starts, line = self.line_starts, node.end_lineno or 0
        return starts[line] if line < len(starts) else len(self.text)

    def lines(self, node: ast.stmt) -> tuple[int, int]:
        """Where the lines of a statement begin and end."""
        return self.line_starts[node.lineno - 1], self.end_of_line(node)

    def span(self, begin: int, end: int) -> Span:
        """The piece of the file that is ``text[begin:end]``."""
        (line, column, start), (end_line, end_column, stop) = map(self._place, (begin, end))
        return Span(line, column + 1, end_line, end_column + 1, start, stop)

    def _place(self, index: int) -> tuple[int, int, int]:
        line = bisect_right(self.line_starts, index)
        begin = self.line_starts[line - 1]
        start = self._byte_starts[line - 1] + len(self._encoded(self.text[begin:index]))
        return line, index - begin, start


def tokens(text: str, begin: int) -> Iterator[tuple[tokenize.TokenInfo, int, int]]:
    """The tokens of a text from an index on, each with the indices where it begins and ends."""
    lines, starts = _lines(text, begin), [begin]

    def readline() -> str:
        line = next(lines, "")
        starts.append(starts[-1] + len(line))
        return line

    for token in tokenize.generate_tokens(readline):
        (line, column), (end_line, end_column) = token.start, token.end
        yield token, starts[line - 1] + column, starts[end_line - 1] + end_column


def _lines(text: str, begin: int) -> Iterator[str]:
    """The lines from an index on, each as it is asked for: a file may be long. One character for
    one, so that indices stay; a lone carriage return would end no comment.
    """
    while begin < len(text):
        end = text.find("\n", begin) + 1 or len(text)
        yield from io.StringIO(re.sub(r"\r(?!\n)", "\n", text[begin:end]), newline="\n")
        begin = end


def read_bytes(path: Path, name: str) -> bytes | Problem:
    """The file's bytes."""
    try:
        return path.read_bytes()
    except OSError as error:
        return Problem(name, 0, f"can't be read: {error.strerror or error}")


def parse(path: Path, name: str, data: bytes) -> Source | Problem:
    """The file's text and syntax tree, or why there is none."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        body = data.removeprefix(_BOM)
        text = body.decode(encoding)
        if text.encode(encoding) != body:
            return Problem(name, 0, f"does not survive decoding and encoding as {encoding}")
        return Source(path, name, data, text, encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return Problem(name, line, f"is not {error.encoding}: byte {data[error.start]:#04x}")
    except SyntaxError as error:
        return Problem(name, error.lineno or 0, f"is no Python {_ours()}: {error.msg}")
    except (ValueError, LookupError) as error:  # null bytes; codecs that aren't for text
        return Problem(name, 0, f"is no Python {_ours()}: {error}")
    except (RecursionError, MemoryError):
        return Problem(name, 0, "is nested too deeply to parse")


def _ours() -> str:
    return ".".join(map(str, sys.version_info[:2]))
