"""The demo on the terminal: the layout, the progress of the training, the reads, the verdict."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from megapg.launch.environment import overridden
from megapg.layout import Field, ParallelLayout
from megapg.megatron.core import version_text
from megapg.megatron.watching.trace import GlobalRead
from megapg.testing import parity, preloaded
from megapg.testing.distributed import Ranks
from megapg.tools.demo.job import Checkpoints, GPTRun, library_text
from megapg.tools.demo.ranks import RankReport, on_a_session, on_globals
from megapg.tools.demo.recut import cut, recut, sizes_for_parity
from megapg.tools.demo.verdict import Row, judge, judge_parity, judge_resumed, reads_of
from megapg.tools.parity.entry import ON_CPUS
from megapg.tools.parity.parity_report import ParityReport
from megapg.tools.plan import load_cluster
from megapg.tools.plan.overview import DEFAULT_CLUSTER
from megapg.tools.plan.picture import draw_picture
from megapg.tools.plan.screen import grid

_PRELOAD = (RankReport.__module__, f"{__package__}.gpt")  # the second imports Megatron-core
Work: TypeAlias = Callable[[GPTRun, bytes, Path], RankReport]


def show(console: Console, layout: ParallelLayout, run: GPTRun, deadline: float) -> bool:
    """Run the demo and show it. True if every row of the verdict held.

    ``deadline`` is in seconds, for each of the runs.

    Raises:
        RankFailedError: a rank failed or the deadline passed; no process is left.
    """
    version, text = version_text(), library_text()
    console.print(
        f"[bold]megapg demo[/]: a Megatron-core {version} GPT on {layout.world_size} CPU ranks "
        f"(gloo), {len(text):,} bytes of text\n"
    )
    console.print(_picture(layout))
    before = _children()
    with (
        tempfile.TemporaryDirectory(prefix="megapg-demo-") as directory,
        overridden(ON_CPUS),
        preloaded(*_PRELOAD),  # one interpreter for the ranks of all runs: its imports take seconds
    ):
        saving = Checkpoints(directory, save_after=max(1, run.steps // 2))
        resuming = Checkpoints(directory, resume=True)
        train = partial(_train, console, layout.world_size, text, deadline)
        session = train("on a session's groups", partial(on_a_session, checkpoints=saving), run)
        globals_ = train("again, on Megatron's globals", on_globals, run)
        resume = partial(on_a_session, checkpoints=resuming)
        resumed = train("resumed from the checkpoint", resume, run)
        other = recut(layout, run)
        recut_ = [] if other is None else train(f"resumed as {cut(other)}", resume, other)
        compared = _compare(console, [run, other or run], layout.world_size, deadline)
    rows = (
        *judge(session, globals_, left_over=len(_children() - before)),
        *judge_resumed(session, resumed, recut_, f"as {cut(other)}" if other else ""),
        judge_parity(compared),
    )
    console.print(_reads(reads_of(session)))
    console.print(verdict_table(rows))
    console.print(_drawn(layout))
    return all(row.held for row in rows)


def _compare(
    console: Console, runs: Sequence[GPTRun], world_size: int, deadline: float
) -> ParityReport:
    """Compare the layouts of the runs with one rank."""
    layouts = {str(sizes): sizes for sizes in (sizes_for_parity(run, world_size) for run in runs)}
    run = runs[0]
    sizes = {"num_layers": run.layers, "hidden_size": run.hidden, "num_attention_heads": run.heads}
    with console.status("comparing the layouts with one rank") as status:
        return parity(
            "gpt" if run.experts is None else "moe",
            layouts.values(),
            options=sizes if run.experts is None else {**sizes, "experts": run.experts},
            deadline=deadline,
            progress=lambda line: status.update(f"comparing the layouts with one rank: {line}"),
        )


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _train(
    console: Console,
    world_size: int,
    text: bytes,
    deadline: float,
    title: str,
    work: Work,
    run: GPTRun,
) -> list[RankReport]:
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=18),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("[cyan]{task.fields[shown]}"),
        TimeElapsedColumn(),
    )
    with tempfile.TemporaryDirectory(prefix="megapg-demo-") as directory:
        lines = Path(directory) / "progress.jsonl"
        job = partial(work, run, text, lines)
        with (
            Progress(*columns, console=console) as bar,
            Ranks(job, world_size, deadline=deadline, preload=_PRELOAD) as ranks,
        ):
            task = bar.add_task(title, total=run.steps, shown="starting")
            done = False
            while not done:
                done = ranks.done(timeout=0.1)
                if lines.exists() and (written := lines.read_text().splitlines()):
                    last = json.loads(written[-1])  # a resumed run does not begin at 0
                    bar.update(task, completed=last["step"] + 1, shown=f"loss {last['loss']:.4f}")
        return ranks.results()


def _picture(layout: ParallelLayout) -> Table:
    """Return a table of the ranks and their groups, one row per rank, for the first ranks."""
    table = Table(title="layout", title_justify="left")
    names: tuple[Field, ...] = ("tp", "pp", "dp", "ep", "expt_dp")
    for heading in ("rank", *(f"{name} group" for name in names)):
        table.add_column(heading, justify="right")
    ranks = list(layout.ranks)[:16]
    for rank in ranks:
        groups = [" ".join(map(str, layout.members(name, rank))) for name in names]
        table.add_row(str(rank), *groups)
    if len(ranks) < layout.world_size:
        table.add_row("...", *("..." for _ in names))
    return table


def _drawn(layout: ParallelLayout) -> Text:
    """Return the grid of the layout as ``megapg plan`` draws it."""
    sizes = {
        "tp": (layout.tp, 1),
        "pp": (layout.pp, 1),
        "vpp": (layout.vpp, None),
        "ep": (layout.ep, 1),
        "expt-tp": (layout.expt_tp, layout.tp),
    }
    options = [f" --{name} {size}" for name, (size, usual) in sizes.items() if size != usual]
    picture = draw_picture(layout, load_cluster(DEFAULT_CLUSTER))
    command = f"megapg plan --world-size {layout.world_size}{''.join(options)}"
    return Text.assemble("\nthe same layout on GPUs: ", (command, "bold"), "\n", grid(picture))


def _reads(reads: Sequence[GlobalRead]) -> Table:
    title = "globals that Megatron-core read by itself"
    table = Table(title=title, title_justify="left")
    for heading in ("getter and place", "field", "answered by", "reads"):
        table.add_column(heading, justify="right" if heading == "reads" else "left")
    for read in reads:
        place = f"{read.getter}\n  {Path(read.file).name}:{read.line}"
        table.add_row(place, read.field, read.answered_by, f"{read.count:,}")
    return table


def verdict_table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("", "claim", "figures", title="verdict", title_justify="left")
    for row in rows:
        mark = "[green]yes[/]" if row.held else "[bold red]NO[/]"
        table.add_row(mark, row.claim, row.figures)
    return table
