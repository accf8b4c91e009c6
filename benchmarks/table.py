"""A table of findings, for the terminal and for a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Table:
    """Rows under a title; the first column is text, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown."""
        lines = [f"### {self.title}", "", _row(self.columns)]
        lines.append(_row([":--", *["--:"] * (len(self.columns) - 1)]))
        lines += [_row(row) for row in self.rows]
        lines += [f"\n{note}" for note in self.notes]
        return "\n".join(lines)

    def print(self, console: Console) -> None:
        """Print the table on the terminal."""
        import rich.box  # not at the top: a GPU machine may have only torch
        import rich.table

        shown = rich.table.Table(title=self.title, box=rich.box.SIMPLE, title_justify="left")
        for index, column in enumerate(self.columns):
            shown.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            shown.add_row(*row)
        console.print(shown)
        for note in self.notes:
            console.print(note, style="dim", markup=False)
        console.print()


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
