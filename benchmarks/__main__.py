"""``python -m benchmarks``: run the benchmarks, and compare megapg with its peers."""

from __future__ import annotations

import enum
import os
import pathlib
import shlex
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

if TYPE_CHECKING:  # heavy modules are imported after the command line is parsed
    from benchmarks.report import Report

RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")
QUICK_WORLDS = (4, 8)

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


class Part(enum.StrEnum):
    """The things to measure."""

    CREATION = "creation"
    LAYOUT = "layout"
    ACCESS = "access"
    BRIDGE = "bridge"
    STARTING = "starting"
    CHECKPOINT = "checkpoint"
    BACKENDS = "backends"
    SCALE = "scale"
    MIGRATE = "migrate"
    PARITY = "parity"


def _worlds(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(size) for size in text.split(",")))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give numbers with commas, such as 4,8,16.") from None
    for size in sizes:
        if size < 4 or size % 4:
            raise typer.BadParameter(f"{size}: the layouts have tp=2 pp=2; give multiples of 4.")
    return sizes


@app.command()
def main(
    worlds: Annotated[
        str, typer.Option(help="World sizes for *creation*: multiples of 4, with commas.")
    ] = "4,8,16,32",
    repeat: Annotated[
        int, typer.Option(min=1, help="How often each contestant of *creation* runs.")
    ] = 3,
    only: Annotated[
        list[Part] | None, typer.Option(help="Measure only this; may be given several times.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Worlds 4 and 8 (checkpoint: 2), the smallest layout, a tiny model and two small "
            "trees, in two minutes, to see that all works.",
        ),
    ] = False,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(
            dir_okay=False,
            help="The Markdown file to write; benchmarks/RESULTS.md where everything is measured.",
        ),
    ] = None,
) -> None:
    """Measure megapg next to what people use today; each figure is a ratio to a peer.

    **creation** makes every process group of a layout (tp=2 pp=2, with and without ep=2) on gloo
    and uses each once. It compares `megapg.session` with `initialize_model_parallel`,
    Megatron-Bridge's recipe on `HyperCommGrid`, and torch's `init_device_mesh`. It also counts the
    calls, threads, descriptors and memory that each adds to a rank.

    **layout** computes the ranks of one rank's groups among up to 131,072, against Megatron's
    `RankGenerator`.

    **access** reads `pg.tp` and similar values, against the getters of `parallel_state`.

    **bridge** gets a function's collection from `resolve`, against a read of the globals, and
    traces and guards the reads of a training step.

    **starting** starts four ranks that have Megatron-core, against `torch.multiprocessing.spawn`.

    **checkpoint** saves and loads model and optimizer (194 MiB). It compares megapg with direct
    calls of `dist_checkpointing` and with torch's distributed checkpoints. It writes to the
    directory for temporary files (`TMPDIR`).

    **backends** lists what megapg does with each backend, and its cost for one rank of 1,024.

    **scale** runs the rendezvous of up to 16,384 simulated ranks, and counts each rank's calls to
    the store. 64 real ranks check the counts.

    **migrate** runs `megapg migrate` on published code. It reports the share of uses that are
    rewritten, and whether the result compiles. The wheels are downloaded to `.corpora` once (33
    MB). `python -m benchmarks.behaviour` trains on a migrated copy of Megatron-core and on the
    installed one, and compares every bit.

    **parity** runs `megapg parity` on sound layouts, on planted faults and on faults of
    Megatron-core itself, and counts what it finds. It needs `tests/support`.

    All ranks are processes on this host. A full run takes about sixteen minutes on two idle cores,
    and 10 GiB of memory at world 32. On a busy machine wall times mislead; look at the ratios of
    CPU time there.

    Examples:

    - `python -m benchmarks --quick`

    - `python -m benchmarks --only creation --worlds 16,32 --repeat 5`
    """
    sizes = QUICK_WORLDS if quick else _worlds(worlds)
    parts = set(only or Part)
    console = Console()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all ranks run on CPUs; `make test-gpu` uses GPUs
    warnings.simplefilter("ignore")  # Megatron-core warns about each missing package
    with console.status("importing torch and Megatron-core"):
        from benchmarks.report import Report
    report = Report(
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]), repeats=repeat
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        if Part.CREATION in parts:
            _creation(report, sizes, progress)
        if Part.LAYOUT in parts:
            _layout(report, quick, progress)
        if Part.ACCESS in parts:
            _access(report, progress)
        if Part.BRIDGE in parts:
            _bridge(report, progress)
        if Part.STARTING in parts:
            _starting(report, progress)
        if Part.CHECKPOINT in parts:
            _checkpoint(report, quick, progress)
        if Part.BACKENDS in parts:
            report.backends = True
        if Part.SCALE in parts:
            _scale(report, quick, progress)
        if Part.MIGRATE in parts:
            _migrate(report, quick, progress)
        if Part.PARITY in parts:
            _parity(report, quick, progress)
    for table in report.tables():
        table.print(console)
    everything = parts == set(Part) and not quick
    target = output or (RESULTS if everything else None)
    if target is not None:
        target.write_text(report.markdown())
        console.print(f"written to {target.name}")


def _creation(report: Report, sizes: tuple[int, ...], progress: Progress) -> None:
    from benchmarks import creation

    tasks = [
        progress.add_task(
            f"creation, world {size}", total=len(creation.plans(size, report.repeats))
        )
        for size in sizes
    ]
    trials = []
    for size, task in zip(sizes, tasks, strict=True):
        trials += creation.run(size, report.repeats, partial(_advance, progress, task))
    report.contests = creation.contests(trials)


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


def _layout(report: Report, quick: bool, progress: Progress) -> None:
    from benchmarks import layout

    sizes = layout.QUICK_WORLD_SIZES if quick else layout.WORLD_SIZES
    task = progress.add_task("layout", total=len(sizes) * len(layout.families()))
    for size in sizes:
        for answer in layout.run(size):
            report.answers.append(answer)
            progress.advance(task)


def _access(report: Report, progress: Progress) -> None:
    from benchmarks import access

    task = progress.add_task("access", total=1)
    report.readings = access.run()
    progress.advance(task)


def _bridge(report: Report, progress: Progress) -> None:
    from benchmarks import bridge, guard, tracing

    task = progress.add_task("bridge", total=2)
    report.costs = bridge.run()
    progress.advance(task)
    report.costs += tracing.run().costs()
    report.costs += guard.run().costs()
    progress.advance(task)


def _starting(report: Report, progress: Progress) -> None:
    from benchmarks import starting

    task = progress.add_task("starting", total=1)
    report.starts = starting.run()
    progress.advance(task)


def _checkpoint(report: Report, quick: bool, progress: Progress) -> None:
    from benchmarks import checkpoint

    repeats = 1 if quick else checkpoint.REPEATS
    worlds = checkpoint.WORLDS[:1] if quick else checkpoint.WORLDS
    tasks = [
        progress.add_task(f"checkpoint, world {size}", total=len(checkpoint.plans(repeats)))
        for size in worlds
    ]
    for size, task in zip(worlds, tasks, strict=True):
        advanced = partial(_advance, progress, task)
        report.standings.append(checkpoint.run(size, repeats, advanced, quick=quick))


def _scale(report: Report, quick: bool, progress: Progress) -> None:
    from benchmarks import scale

    task = progress.add_task("scale", total=scale.steps(quick=quick))
    for found in scale.run(quick=quick):
        report.scale = found
        progress.advance(task)


def _migrate(report: Report, quick: bool, progress: Progress) -> None:
    from benchmarks import corpora, migrate

    trees = (corpora.named("mbridge"), corpora.named("mcore_bridge")) if quick else corpora.CORPORA
    task = progress.add_task("migrate, trees", total=len(trees))
    for tree in trees:
        report.outcomes.append(migrate.run(tree))
        progress.advance(task)


def _parity(report: Report, quick: bool, progress: Progress) -> None:
    from benchmarks import parity

    task = progress.add_task("parity", total=len(parity.KINDS))
    for found in parity.run(quick=quick):
        report.proofs.append(found)
        progress.advance(task)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
