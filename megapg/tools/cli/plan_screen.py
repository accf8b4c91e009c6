"""A plan in the terminal: 80 columns, readable without colour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megapg.tools.plan import Plan
from megapg.tools.plan.bars import LETTERS, PARTS, Bar, Memory, text_of_bytes, text_of_range
from megapg.tools.plan.nccl import MEASURED
from megapg.tools.plan.overview import TRAFFIC
from megapg.tools.plan.picture import Picture
from megapg.tools.plan.screen import grid
from megapg.tools.plan.spans import text_of_ranks

_ROOM = 54  # columns of the longest bar
_STYLES = ("cyan", "yellow", "green", "magenta", "blue")  # of the parts of a bar


def show(plan: Plan, picture: Picture, console: Console) -> None:
    """Print the grid, the groups, the communicators, the model and the findings."""
    for part in (grid(picture), groups(plan), communicators(plan), *model(plan), findings(plan)):
        console.print(part)


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
        several = "s" * (len(each.stages) > 1)
        stages = f"Stage{several} {_stages(each.stages)}: " if len(plan.stages) > 1 else ""
        lines.append(
            f"{stages}{each.connected} of two ranks or more. They take "
            f"{text_of_range(*each.memory)} of a GPU when all are in use."
        )
    ordered = sorted(MEASURED, key=lambda measured: measured.bytes)
    sources = [
        f"Measured: {text_of_bytes(end.bytes)} for each ({end.source})."
        for end in (ordered[0], ordered[-1])
    ]
    return _section(
        "NCCL communicators of a rank, without WORLD",
        [*map(Text, lines), *(Text(line, style="dim") for line in sources)],
    )


def _stages(stages: Sequence[int]) -> str:
    return text_of_ranks(stages) if len(stages) > 1 else str(stages[0])


# --- the model ------------------------------------------------------------------------------------


def model(plan: Plan) -> Iterator[RenderableType]:
    """Yield the memory of each stage and the traffic of the plan's rank, if there is a model."""
    if (memory := plan.memory) is None:
        return
    yield _section("Memory of a rank by pipeline stage", [Text(memory.job)])
    yield Padding(_sizes(memory), (1, 0, 1, 2))
    over = memory.limit < memory.longest
    yield Padding(Text("\n").join(_bars(memory)), (0, 0, 1, 2))
    verdict = Text(memory.verdict, style="bold red" if over else "bold")
    yield Padding(Text("\n").join([verdict, Text(memory.assumptions, "dim")]), (0, 0, 0, 2))
    yield _traffic(plan)


def _sizes(memory: Memory) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", *PARTS, "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for bar in memory.bars:
        if hidden := memory.gap_before(bar):
            table.add_row(":", f"{hidden:,} stages")
        *held, _ = map(text_of_bytes, bar.sizes)
        total = text_of_bytes(bar.cost.total)
        table.add_row(bar.label, *held, text_of_range(*bar.cost.communicators), total)
    return table


def _bars(memory: Memory) -> Iterator[Text]:
    """Yield the bars. Each part is a letter, and ``|`` is the memory of a GPU."""
    label = max(len(bar.name) for bar in memory.bars)
    yield Text.assemble(
        *(
            (f"{letter} {part}  ", style)
            for letter, part, style in zip(LETTERS, PARTS, _STYLES, strict=True)
        ),
        "| GPU",
    )
    for bar in memory.bars:
        if hidden := memory.gap_before(bar):
            yield Text(f"{hidden:,} stages", style="dim")
        yield Text(bar.name.ljust(label) + "  ") + _bar(bar, memory)


def _bar(bar: Bar, memory: Memory) -> Text:
    drawn, held = Text(), 0
    for letter, size, style in zip(LETTERS, bar.sizes, _STYLES, strict=True):
        held += size
        drawn.append(letter * (round(_ROOM * held / memory.longest) - len(drawn)), style)
    limit = round(_ROOM * memory.limit / memory.longest)
    drawn.pad_right(limit - len(drawn))
    return Text.assemble(drawn[:limit], ("|", "bold"), drawn[limit:])


def _traffic(plan: Plan) -> Group:
    title = f"Traffic of rank {plan.rank} in one step"
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in TRAFFIC:
        left = name in ("field", "collective")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in plan.traffic:
        table.add_row(*row)
    return _section(
        title, [table] if plan.traffic else [Text("None: each group of the rank has one rank.")]
    )


# --- findings -------------------------------------------------------------------------------------


def findings(plan: Plan) -> Group:
    """Return each problem with its cure."""
    lines = []
    for each in plan.findings:
        lines.append(Text(each.what[0].upper() + each.what[1:], style="yellow"))
        lines.append(Text(f"Cure: {each.cure}"))
    return _section("Findings", lines or [Text("None.")])


def _section(title: str, lines: Sequence[RenderableType]) -> Group:
    """Return lines below a title. The further lines of a wrapped one are indented."""
    return Group(Text(f"\n{title}", style="bold"), *(Padding(line, (0, 0, 0, 2)) for line in lines))
