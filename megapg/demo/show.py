"""The demo on the terminal: the layout, the progress of the training, the reads, the verdict."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from megapg.demo.job import Checkpoints, GPTRun
from megapg.demo.ranks import RankReport, on_a_session, on_globals
from megapg.demo.recut import cut, recut, sizes_for_parity
from megapg.demo.verdict import Row, judge, judge_parity, judge_resumed, reads_of
from megapg.launch.environment import overridden
from megapg.layout import Field, ParallelLayout
from megapg.megatron import GlobalRead
from megapg.megatron.watching.trace import empty_table
from megapg.testing import ParityReport, Ranks, parity, preloaded

_PRELOAD = (RankReport.__module__, f"{__package__}.gpt")  # the second imports Megatron-core
# There are more ranks than a machine may have GPUs. On a CPU, Megatron-core prints many warnings on
# every rank.
_ON_CPUS = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
Work: TypeAlias = Callable[[GPTRun, bytes, Path], RankReport]
_BLOCKS = "▁▂▃▄▅▆▇█"


def show(
    console: Console, layout: ParallelLayout, run: GPTRun, text: bytes, deadline: float
) -> bool:
    """Run the demo and show it. True if every row of the verdict held.

    ``deadline`` is in seconds, for each of the runs.

    Raises:
        RankFailedError: a rank failed or the deadline passed; no process is left.
    """
    version = importlib.metadata.version("megatron-core")
    console.print(
        f"[bold]megapg demo[/]: a Megatron-core {version} GPT on {layout.world_size} CPU ranks "
        f"(gloo), {len(text):,} bytes of text\n"
    )
    console.print(_picture(layout))
    before = _children()
    with (
        tempfile.TemporaryDirectory(prefix="megapg-demo-") as directory,
        overridden(_ON_CPUS),
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
    console.print(_verdict(rows))
    return all(row.held for row in rows)


def _compare(
    console: Console, runs: Sequence[GPTRun], world_size: int, deadline: float
) -> ParityReport:
    """Compare the layouts of the runs with one rank."""
    layouts = {str(sizes): sizes for sizes in (sizes_for_parity(run, world_size) for run in runs)}
    with console.status("comparing the layouts with one rank") as status:
        return parity(
            f"{__package__}.gpt:build_for_parity",
            layouts.values(),
            options={"run": runs[0]},
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
    with tempfile.TemporaryDirectory(prefix="megapg-demo-") as directory:
        progress = Path(directory) / "progress.jsonl"
        board = _Board(title, run.steps)
        job = partial(work, run, text, progress)
        with (
            Live(console=console, refresh_per_second=8, get_renderable=board.render) as live,
            Ranks(job, world_size, deadline=deadline, preload=_PRELOAD) as ranks,
        ):
            while not ranks.done(timeout=0.1):
                board.read(progress)
            board.read(progress)
            live.refresh()
        console.print()
        return ranks.results()


class _Board:
    """The live view of one run, fed from the lines that rank 0 writes."""

    def __init__(self, title: str, steps: int) -> None:
        self._losses: list[float] = []
        self._done = 0
        self._tokens = 0
        self._started = 0.0
        self._pace = 0.0
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
        )
        self._task = self._bar.add_task(title, total=steps)

    def read(self, progress: Path) -> None:
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[len(self._losses) :]:
            step = json.loads(line)
            now = time.monotonic()
            if not self._losses:
                self._started, first = now, step["tokens"]
                self._tokens = first
            elif now > self._started:
                self._pace = (step["tokens"] - self._tokens) / (now - self._started)
            self._losses.append(step["loss"])
            self._done = step["step"] + 1  # a resumed run does not begin at 0
        self._bar.update(self._task, completed=self._done)

    def render(self) -> RenderableType:
        if not self._losses:
            return Group(self._bar, Text("  starting the ranks ...", style="dim"))
        line = f"  loss {self._losses[-1]:.4f}  {_sparkline(self._losses)}"
        pace = f"  {self._pace:,.0f} tokens/s" if self._pace else ""
        return Group(self._bar, Text(line + pace, style="cyan"))


def _sparkline(values: Sequence[float], width: int = 40) -> str:
    stride = max(1, len(values) // width)
    shown = values[::stride][-width:]
    low, high = min(shown), max(shown)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in shown)


def _picture(layout: ParallelLayout) -> Table:
    """Return a table of the ranks and their groups, one row per rank, for the first ranks."""
    table = Table(title="layout", title_justify="left", pad_edge=False)
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


def _reads(reads: Sequence[GlobalRead]) -> Table:
    title = "reads of globals that Megatron-core made although it was given everything"
    table = empty_table(title, ("place", "getter", "field", "answered by", "reads"))
    for read in reads:
        place = f"{read.file.rpartition('megatron/core/')[2]}:{read.line}"
        table.add_row(place, read.getter, read.field, read.answered_by, f"{read.count:,}")
    return table


def _verdict(rows: Sequence[Row]) -> Table:
    table = Table("", "claim", "figures", title="verdict", title_justify="left", pad_edge=False)
    for row in rows:
        mark = "[green]yes[/]" if row.held else "[bold red]NO[/]"
        table.add_row(mark, row.claim, row.figures)
    return table
