"""Tables of findings, for the terminal and for a Markdown file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        worlds: world sizes for *creation*.
        repeat: how often each contestant of *creation* runs.
        quick: measure only as much as shows that all works.
    """

    worlds: tuple[int, ...]
    repeat: int
    quick: bool


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


def verdict(ratio: float, target: float | None) -> tuple[str, str]:
    """Return the cells for the wanted ratio, and for whether it is met."""
    if target is None:
        return "-", "-"
    return f"at most {target:g}", "met" if ratio <= target else "MISSED"


@dataclass(frozen=True)
class Cost:
    """The cost of one thing relative to another, measured in the same run.

    Attributes:
        what: description.
        ours: the expression.
        theirs: the thing to compare with.
        ours_taken: time of the first.
        theirs_taken: time of the second.
        unit: unit of both times.
        target: the largest promised ratio, if any.
    """

    what: str
    ours: str
    theirs: str
    ours_taken: float
    theirs_taken: float
    unit: str
    target: float | None = None


def table_of_costs(title: str, costs: Sequence[Cost], note: str) -> Table:
    """Return a table with a row for each cost."""
    rows = []
    for cost in costs:
        ratio = cost.ours_taken / cost.theirs_taken
        digits = {"ns": 0, "s": 2}.get(cost.unit, 1)
        times = f"{cost.ours_taken:.{digits}f} / {cost.theirs_taken:.{digits}f} {cost.unit}"
        compared = (f"`{cost.ours}`", f"`{cost.theirs}`", f"{ratio:.2f}")
        rows.append((cost.what, *compared, *verdict(ratio, cost.target), times))
    columns = ("", "what", "compared with", "ratio", "wanted", "", "times (noise)")
    return Table(title, columns, tuple(rows), (note,))
