"""Where the edits of a file lie, as editors count: lines and columns from 1, in characters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from megapg.migrate.migration import Edit, Rewritten
from megapg.migrate.source import line_starts


def located(file: Rewritten) -> Iterator[tuple[Edit, dict[str, int]]]:
    """Every edit with the region that it replaces, under the names that reports use."""
    starts = line_starts(file.text)

    def place(index: int) -> tuple[int, int]:
        line = bisect_right(starts, index)
        return line, index - starts[line - 1] + 1

    for edit in file.edits:
        (line, column), (end_line, end_column) = place(edit.start), place(edit.stop)
        yield (
            edit,
            {"line": line, "column": column, "end_line": end_line, "end_column": end_column},
        )
