"""A plan in the terminal: 80 columns, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megapg.plan.nccl import MEASURED
from megapg.plan.overview import Plan
from megapg.plan.picture import Panel, Picture
from megapg.plan.spans import text_of_ranks

_WIDTH = 80
_ACROSS = 8  # cells in a line of a node
_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")


def show(plan: Plan, picture: Picture, console: Console) -> None:
    """Print the grid, the groups, the communicators and the findings."""
    for part in (grid(picture), groups(plan), communicators(plan), findings(plan)):
        console.print(part)


# --- the grid -------------------------------------------------------------------------------------


def grid(picture: Picture) -> Text:
    """Return the grid of ranks, with as many fields next to each other as fit."""
    lines = [Text(picture.title, style="bold"), Text()]
    lines += [Text(line, style="dim") for line in _legend(picture)]
    rows = (row for panel in picture.panels for row in panel.numbers.values())
    digits = max(len(str(n)) for row in rows for n in (0, *row) if n is not None)
    label = max(6, len(str(max(picture.ranks))) + 2)
    cells = (max(digits, 2) + 1) * min(_ACROSS, len(next(iter(picture.ranks.values()))))
    room = 3 + max(cells, *(len(panel.caption) for panel in picture.panels))
    beside = max(1, (_WIDTH - label + 3) // room)
    for start in range(0, len(picture.panels), beside):
        panels = picture.panels[start : start + beside]
        lines += [Text(), *_panels(picture, panels, label, room, max(digits, 2) + 1)]
    return Text("\n").join(lines)


def _legend(picture: Picture) -> list[str]:
    lines = ["A row is a node, a column a local rank. Equal numbers are one group."]
    if picture.rank is not None:
        lines.append(
            f"Only the groups of rank {picture.rank} have numbers; brackets mark the rank."
        )
    return [*lines, *filter(None, [picture.note])]


def _panels(
    picture: Picture, panels: Sequence[Panel], label: int, room: int, cell: int
) -> Iterator[Text]:
    heads, captions = Text("node".ljust(label)), Text(" " * label)
    for panel in panels:
        heads.append(panel.name.ljust(room), style="bold")
        slow = panel.span.link == "network"
        captions.append(panel.caption.ljust(room), style="yellow" if slow else "dim")
    for line in (heads, captions):
        line.rstrip()
        yield line
    for node, hidden, _ in picture.gaps():
        if hidden:
            like = "like these" if picture.repeats else "more"
            yield Text(f"{':':>{label - 2}}  {hidden:,} nodes {like}", style="dim")
        for at in range(0, len(picture.ranks[node]), _ACROSS):
            line = Text((f"{node}" if at == 0 else "").rjust(label - 2) + "  ")
            for panel in panels:
                row = _row(picture, panel, node, at, cell)
                row.pad_right(room - len(row))
                line.append(row)
            line.rstrip()
            yield line


def _row(picture: Picture, panel: Panel, node: int, at: int, cell: int) -> Text:
    row = Text()
    for place in range(at, min(at + _ACROSS, len(picture.ranks[node]))):
        rank, number = picture.ranks[node][place], panel.numbers[node][place]
        if rank is None:
            row.append(" " * cell)
        elif number is None or (picture.rank is not None and number != panel.lit):
            row.append(("-" if number is None else ".").rjust(cell), style="dim")
        elif rank == picture.rank:
            row.append(f"[{number}]".rjust(cell), style="bold reverse")
        else:
            row.append(str(number).rjust(cell), style=_STYLES[number % len(_STYLES)])
    return row


# --- groups, communicators, findings --------------------------------------------------------------


def groups(plan: Plan) -> Table:
    """Return a table with a row for each communicator of the plan's rank."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.title = Text(f"\nGroups, and the ranks that share one with rank {plan.rank}")
    table.title_style = "bold"
    for name in ("size", "groups", "nodes", "link"):
        table.add_column(name, justify="left" if name == "link" else "right", no_wrap=True)
    table.add_column("ranks", no_wrap=True)
    table.add_column("fields")
    spans = {span.field: span for span in plan.spans}
    alone: list[str] = []
    for made in plan.communicators:
        span = spans[made.fields[0]]  # type: ignore[index]
        if len(made.ranks) == 1:
            alone += made.fields
            continue
        table.add_row(
            f"{span.size:,}",
            f"{span.count:,}",
            "-".join(f"{n:,}" for n in sorted({*span.nodes})),
            Text(span.link, style="yellow" if span.link == "network" else ""),
            text_of_ranks(made.ranks),
            " ".join(made.fields),
        )
    if alone:
        table.add_row("1", "", "", "none", str(plan.rank), " ".join(alone))
    return table


def communicators(plan: Plan) -> Group:
    """Return the number of communicators of a rank, and their memory."""
    lines = []
    for each in plan.stages:
        low, high = (f"{size / 2**30:.1f}" for size in each.memory)
        several = "s" * (len(each.stages) > 1)
        stages = f"Stage{several} {_stages(each.stages)}: " if len(plan.stages) > 1 else ""
        lines.append(
            f"{stages}{each.connected} of two ranks or more. They take {low} to {high} GiB of a "
            "GPU when all are in use."
        )
    ordered = sorted(MEASURED, key=lambda measured: measured.bytes)
    sources = [
        f"Measured: {end.bytes / 2**20:.0f} MiB for each ({end.source})."
        for end in (ordered[0], ordered[-1])
    ]
    return _section(
        "NCCL communicators of a rank, without WORLD",
        [*map(Text, lines), *(Text(line, style="dim") for line in sources)],
    )


def _stages(stages: Sequence[int]) -> str:
    return text_of_ranks(stages) if len(stages) > 1 else str(stages[0])


def findings(plan: Plan) -> Group:
    """Return each problem with its cure."""
    lines = []
    for each in plan.findings:
        lines.append(Text(each.what[0].upper() + each.what[1:], style="yellow"))
        lines.append(Text(f"Cure: {each.cure}"))
    return _section("Findings", lines or [Text("None.")])


def _section(title: str, lines: Sequence[Text]) -> Group:
    """Return lines below a title. The further lines of a wrapped one are indented."""
    return Group(Text(f"\n{title}", style="bold"), *(Padding(line, (0, 0, 0, 2)) for line in lines))
