"""The report: a table of layouts by checks, for a terminal, a program or a test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from megapg.errors import ParityError
from megapg.tools.parity.comparison import CHECKS

if TYPE_CHECKING:
    from rich.table import Table

State: TypeAlias = Literal["agrees", "differs", "failed"]

_HEADINGS = ("loss", "gradients", "norm", "weights", "sharded", "replicas")  # of CHECKS
_STYLES = {"agrees": "green", "differs": "bold red", "failed": "bold red"}


@dataclass(frozen=True)
class Cell:
    """One check in one layout.

    Attributes:
        check: name of the check.
        state: "agrees", "differs", or "failed" if the step raised.
        off: largest difference, as a share of the reference.
        parameter: the first parameter that differs.
        axis: the axis that the numbers point to.
        ranks: the ranks with a difference.
        text: the finding in words.
    """

    check: str
    state: State
    off: float = 0.0
    parameter: str = ""
    axis: str = ""
    ranks: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class LayoutReport:
    """All checks of one layout.

    Attributes:
        layout: the sizes as they were written.
        world_size: number of ranks.
        seconds: wall time of the ranks.
        cells: one per check.
        reads: places that read Megatron's globals, if their groups differ from the layout's.
    """

    layout: str
    world_size: int
    seconds: float
    cells: tuple[Cell, ...]
    reads: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """True if every check agrees."""
        return all(cell.state == "agrees" for cell in self.cells)

    @property
    def wrong(self) -> tuple[Cell, ...]:
        """The cells that do not agree, in the order of the checks."""
        return tuple(cell for cell in self.cells if cell.state != "agrees")


@dataclass(frozen=True)
class ParityReport:
    """The result of a comparison.

    Attributes:
        precision: ``"float64"`` or ``"float32"``.
        tolerance: the largest difference that counts as rounding, as a share of the reference.
        samples: size of the global batch.
        loss: mean loss of one rank in the first step.
        layouts: one report per layout.
        notes: remarks, such as the reason for float32.
    """

    precision: str
    tolerance: float
    samples: int
    loss: float
    layouts: tuple[LayoutReport, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """True if every layout computes what one rank computes."""
        return all(layout.agrees for layout in self.layouts)

    def check(self) -> None:
        """Raise ParityError, which is an AssertionError, if a layout differs."""
        if not self.agrees:
            raise ParityError(f"not every layout computes what one rank computes\n{self.text()}")

    def as_dict(self) -> dict[str, object]:
        """The report as plain values for JSON; ``schema.json`` describes them."""
        plain = asdict(self)
        for cell in (cell for layout in plain["layouts"] for cell in layout["cells"]):
            cell["off"] = cell["off"] if math.isfinite(cell["off"]) else None
            cell["ranks"] = [*cell["ranks"]]
        plain["layouts"], plain["notes"] = [*plain["layouts"]], [*plain["notes"]]
        for layout in plain["layouts"]:
            layout["cells"], layout["reads"] = [*layout["cells"]], [*layout["reads"]]
        return {"schema_version": 1, "agrees": self.agrees, **plain}

    def text(self) -> str:
        """The report as plain text."""
        width = max(len(layout.layout) for layout in self.layouts)
        lines = [
            f"{layout.layout:<{width}}  "
            + ("agrees" if layout.agrees else "differs in " + _names(layout.wrong))
            for layout in self.layouts
        ]
        return "\n".join([*lines, *self.findings(), *self.notes])

    def findings(self) -> list[str]:
        """One line per layout that does not agree: the first finding, and the checks after it."""
        lines = []
        for layout in self.layouts:
            for first, *others in [layout.wrong] if layout.wrong else []:
                later = _names([cell for cell in others if cell.text])
                more = f". Later checks that differ: {later}" if later else ""
                check = "the run failed" if first.state == "failed" else first.check
                took = f". Took the globals: {', '.join(layout.reads)}" if layout.reads else ""
                lines.append(f"{layout.layout}: {check}: {first.text}{more}{took}")
        return lines

    def table(self) -> Table:
        """The report as a table for a terminal."""
        from rich.table import Table
        from rich.text import Text

        title = "largest relative difference from one rank (! differs)"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("layout", overflow="fold")
        for heading in ("ranks", *_HEADINGS):
            # A number must never be cut: 2e… may be 2e-16 or 2e-01.
            table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
        for layout in self.layouts:
            cells = {cell.check: cell for cell in layout.cells}
            shown = [
                Text(_short(cells[check]), style=_STYLES[cells[check].state]) for check in CHECKS
            ]
            table.add_row(Text(layout.layout), str(layout.world_size), *shown)
        return table


def _short(cell: Cell) -> str:
    if cell.state == "failed":
        return "failed"
    return f"{cell.off:.0e}{'!' if cell.state == 'differs' else ''}"


def _names(cells: Sequence[Cell]) -> str:
    return ", ".join(cell.check for cell in cells)
