"""The grid of a picture in the terminal: 80 columns, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from megapg.tools.plan.picture import Panel, Picture

_WIDTH = 80
_ACROSS = 8  # cells in a line of a node
_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_cyan", "bright_yellow")


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
