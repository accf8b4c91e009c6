"""``python -m benchmarks``: run the benchmarks, and compare megapg with its peers."""

from __future__ import annotations

import datetime
import enum
import importlib
import importlib.metadata
import os
import pathlib
import platform
import shlex
import sys
import warnings
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.table import Options, Table

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
    REFIT = "refit"


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
        pathlib.Path | None, typer.Option(dir_okay=False, help="A Markdown file to write.")
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
    MB).

    **parity** runs `megapg parity` on sound layouts, on planted faults and on faults of
    Megatron-core itself, and counts what it finds. It needs `tests/support`.

    **refit** moves the weights of a trainer into a rollout of another layout. It compares
    `megapg.Refit` with Megatron-core's resharding (0.19) and with a broadcast of gathered
    parameters: time, peak memory and bytes.

    All ranks are processes on this host. A full run takes about sixteen minutes on two idle cores,
    and 10 GiB of memory at world 32. On a busy machine wall times mislead; look at the ratios of
    CPU time there.

    Examples:

    - `python -m benchmarks --quick`

    - `python -m benchmarks --only creation --worlds 16,32 --repeat 5`
    """
    given = Options((4, 8) if quick else _worlds(worlds), repeat, quick)
    console = Console()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all ranks run on CPUs; `make test-gpu` uses GPUs
    warnings.simplefilter("ignore")  # Megatron-core warns about each missing package
    found: list[Table] = []
    columns = (SpinnerColumn(finished_text="done"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for part in dict.fromkeys(only or Part):
            task = progress.add_task(part, total=1)
            found += _tables(part, given)
            progress.advance(task)
    for table in found:
        table.print(console)
    if output is not None:
        output.write_text("\n\n".join([_head(), *(table.markdown() for table in found)]) + "\n")
        console.print(f"written to {output}")


def _tables(part: Part, given: Options) -> list[Table]:
    """Measure a part. Its module is imported only now, as most import torch and Megatron-core."""
    tables: list[Table] = importlib.import_module(f"benchmarks.{part}").tables(given)
    return tables


def _head() -> str:
    versions = [f"{each} {importlib.metadata.version(each)}" for each in ("megatron-core", "torch")]
    return (
        f"`{shlex.join(['python', '-m', 'benchmarks', *sys.argv[1:]])}` wrote these tables on "
        f"{datetime.date.today()}, with {', '.join(versions)} and Python "
        f"{platform.python_version()}, on {os.cpu_count()} cores. "
        f"The load average was {os.getloadavg()[0]:.1f} afterwards."
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
