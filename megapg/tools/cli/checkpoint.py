"""The command line: ``megapg checkpoint ls | inspect | verify``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from megapg.errors import CheckpointError, CheckpointNotFoundError
from megapg.layout import ParallelLayout
from megapg.tools.cli.console import AsJson, add_to, make_app, print_json, refuse, say

if TYPE_CHECKING:  # they import torch, which takes seconds that --help should not take
    from rich.table import Table
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megapg.checkpoint.contents import Contents
    from megapg.checkpoint.directory import CheckpointInfo
    from megapg.checkpoint.verify import Report

app = make_app(
    "List, inspect and verify checkpoints. Needs no GPU and no process group, "
    "and runs no code from a checkpoint."
)

_ROWS = 20  # of a long list, without --all
_NAMED = 5  # damaged entries, in the report of a checkpoint


@add_to(app)
def ls(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="The directory that was passed to save_checkpoint()."),
    ],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a directory: iteration, state, size, layout and time.

    A star marks the latest checkpoint, from which a job resumes. The list has interrupted saves,
    too. The next save removes them.

    Exit code 0: the list is printed, or is empty. 2: the directory can't be read.

    Example: megapg checkpoint ls checkpoints
    """
    with _refusing():
        from megapg.checkpoint.directory import latest, list_checkpoints

        newest = latest(_existing(directory))
        found = [
            (info, *_layout_or_problem(info), newest is not None and info.path == newest.path)
            for info in list_checkpoints(directory)
        ]
        if as_json:
            print_json(
                [
                    {**_described(info, problem), "layout": _sizes(layout), "latest": is_latest}
                    for info, layout, problem, is_latest in found
                ]
            )
            return
        if not found:
            Console(soft_wrap=True).print(_plain(f"no checkpoints in {directory}"))
            return
        table = _table("", "iteration", "state", "size", "saved by", "saved at", right=(1, 3))
        for info, layout, problem, is_latest in found:
            table.add_row(
                "*" if is_latest else "",
                "release" if info.release else str(info.iteration),
                _plain(problem or "complete"),
                decimal(info.size),
                _short(layout),
                info.saved_at.astimezone().strftime("%Y-%m-%d %H:%M") if info.saved_at else "",
            )
        Console().print(table)


@add_to(app)
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR_OR_ITER",
            help="A checkpoint, such as checkpoints/iter_0000123, or a directory of checkpoints, "
            "for the latest of them.",
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help=f"Print whole lists, not only {_ROWS} rows of each.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint: layout, random streams, and each tensor with its shards.

    The column "cut" has the number of pieces of each dimension: 2x1 cuts the first one in halves.

    Exit code 0: the contents are printed. 2: there is no checkpoint, or it can't be read. Then
    "megapg checkpoint verify" tells more.

    Example: megapg checkpoint inspect checkpoints/iter_0000123 --all
    """
    with _refusing():
        from megapg.checkpoint.contents import read_contents

        contents = read_contents(_one(path))
        if as_json:
            print_json(_inspected(contents))
        else:
            _show(contents, None if everything else _ROWS)


@add_to(app)
def verify(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A checkpoint, such as checkpoints/iter_0000123, or a directory of checkpoints, "
            "for all complete ones.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Find files of checkpoints that are truncated, missing, changed, swapped or foreign.

    If the checkpoint has a manifest (integrity.json), every bit is compared. megapg always writes
    one, and Megatron-core on request. Without a manifest, each shard is compared with its own
    checksums, which do not show that another file of the same form replaced a whole file.

    The report of a damaged checkpoint names its damaged entries, and says whether the weights alone
    still load.

    Exit code 0: no problem found. 1: problems, one line for each file. 2: nothing to verify.

    Example: megapg checkpoint verify checkpoints && rsync -a checkpoints backup:
    """
    with _refusing():
        from megapg.checkpoint.directory import list_checkpoints
        from megapg.checkpoint.verify import verify as verify_one

        chosen, incomplete = [path], []
        if not _is_checkpoint(path):
            found = list_checkpoints(_existing(path))
            chosen = [info.path for info in found if info.complete]
            # An interrupted save is no problem: the next save removes it.
            incomplete = [i for i in found if not i.complete and not i.path.name.startswith(".")]
            if not chosen and not incomplete:
                raise CheckpointNotFoundError(f"{path} has no complete checkpoint.")
        reports = []
        for one in chosen:
            with _progress(one.name, shown=not as_json) as advance:
                reports.append(verify_one(one, on_progress=advance))
            if not as_json:
                _say(reports[-1])
        if as_json:
            broken = [{"path": i.path, "good": False, "problems": [i.problem]} for i in incomplete]
            print_json([*({**asdict(each), "good": each.good} for each in reports), *broken])
        else:
            for info in incomplete:
                say("incomplete ", "red", _plain(f"{info.path.name} {info.problem}"))
    if incomplete or not all(report.good for report in reports):
        raise typer.Exit(1)


# --- which checkpoint -----------------------------------------------------------------------------


def _is_checkpoint(path: Path) -> bool:
    from megapg.checkpoint.directory import FORMAT_FILE, INDEX_FILE, iteration_of
    from megapg.checkpoint.manifest import MANIFEST_FILE

    files = (INDEX_FILE, FORMAT_FILE, MANIFEST_FILE)
    return (
        iteration_of(path.absolute().name) is not None
        or any((path / name).exists() for name in files)
        or any(path.glob("*.distcp"))
    )


def _one(path: Path) -> Path:
    from megapg.checkpoint.directory import latest

    if _is_checkpoint(path):
        return path
    newest = latest(_existing(path))
    if newest is None:
        raise CheckpointNotFoundError(f"{path} has no complete checkpoint.")
    return newest.path


def _existing(path: Path) -> Path:
    """Return a directory.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    if not path.is_dir():
        problem = "is a file, not a directory" if path.exists() else "does not exist"
        raise CheckpointNotFoundError(f"{path} {problem}.")
    return path


def _layout_or_problem(info: CheckpointInfo) -> tuple[ParallelLayout | None, str]:
    from megapg.checkpoint.contents import layout_of_checkpoint

    if not info.complete:
        return None, info.problem
    try:
        return layout_of_checkpoint(info.path), ""
    except CheckpointError:
        return None, "damaged"


# --- what is shown --------------------------------------------------------------------------------


def _described(info: CheckpointInfo, problem: str) -> dict[str, object]:
    return {
        **asdict(info),
        "problem": problem,
        "size": info.size,
        "saved_at": info.saved_at.isoformat() if info.saved_at else None,
    }


_SIZES = ("world_size", "tp", "pp", "vpp", "cp", "ep", "expt_tp", "dp", "expt_dp")


def _sizes(layout: ParallelLayout | None) -> dict[str, object] | None:
    if layout is None:
        return None
    names = (*_SIZES, "order", "optimizer_instances", "hierarchical_cp")
    return {name: getattr(layout, name) for name in names}


def _short(layout: ParallelLayout | None) -> str:
    """Return a layout in short form: the sizes that are not 1."""
    if layout is None:
        return "unknown"
    shown = [
        name for name in ("tp", "pp", "vpp", "cp", "ep", "dp") if (getattr(layout, name) or 1) > 1
    ]
    if layout.expt_tp != layout.tp:
        shown.append("expt_tp")
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    return " ".join([ranks, *(f"{name}{getattr(layout, name)}" for name in shown)])


def _cut(entry: TensorStorageMetadata) -> str:
    """Return the pieces of each dimension, 2x1; or their number if they form no grid."""
    offsets = [tuple(chunk.offsets) for chunk in entry.chunks]
    grid = [len(set(axis)) for axis in zip(*offsets, strict=True)]
    if math.prod(grid) != len(offsets):
        return str(len(offsets))
    return "whole" if len(offsets) == 1 else "x".join(map(str, grid))


def _inspected(contents: Contents) -> dict[str, Any]:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    places = contents.metadata.storage_data or {}
    lengths = {index.fqn: place.length for index, place in places.items()}
    tensors: list[dict[str, Any]] = []
    objects: dict[str, dict[str, Any]] = {}
    for key, entry in contents.metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            # Group the entries of one object: rng_state/shard_0.0_2.2 and so on.
            name = key.partition("/shard_")[0]
            row = objects.setdefault(name, {"key": name, "entries": 0, "bytes": 0})
            row["entries"] += 1
            row["bytes"] += lengths.get(key, 0)
            continue
        tensors.append(
            {
                "key": key,
                "shape": list(entry.size),
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shards": len(entry.chunks),
                "cut": _cut(entry),
                "bytes": math.prod(entry.size) * entry.properties.dtype.itemsize,
            }
        )
    streams, problem = _random_streams(contents)
    layout = contents.saved_layout()
    return {
        "path": str(contents.path),
        "iteration": contents.iteration,
        "layout": _sizes(layout),
        "world_size": None if layout is None else layout.world_size,
        "random_streams": streams,
        "random_streams_problem": problem,
        "content_metadata": contents.content_metadata,
        "common": sorted(map(str, contents.common)),
        "tensors": tensors,
        "objects": list(objects.values()),
        "totals": {
            "tensors": len(tensors),
            "shards": sum(row["shards"] for row in tensors),
            "tensor_bytes": sum(row["bytes"] for row in tensors),
            "objects": sum(row["entries"] for row in objects.values()),
            "object_bytes": sum(row["bytes"] for row in objects.values()),
        },
    }


def _random_streams(contents: Contents) -> tuple[list[dict[str, Any]], str]:
    """Return the layouts of the records of random streams, and why they are unknown if they are."""
    from megapg.checkpoint.rng_keys import detect

    try:
        found = detect(contents.keys())
    except CheckpointError as error:
        return [], str(error)
    return [
        {"kind": layout.kind, "key": layout.key, "sizes": list(layout.sizes)} for layout in found
    ], ""


def _show(contents: Contents, rows: int | None) -> None:
    from rich.table import Table

    found = _inspected(contents)
    totals, iteration = found["totals"], found["iteration"]
    kinds = [
        f"{stream['kind']} ({' x '.join(map(str, stream['sizes']))}) in {stream['key']}"
        for stream in found["random_streams"]
    ]
    content = found["content_metadata"] or {}
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in {
        "checkpoint": found["path"],
        "iteration": "unknown" if iteration is None else iteration,
        "saved by": _short(contents.saved_layout()),
        "random streams": found["random_streams_problem"] or ", ".join(kinds) or "none",
        "content": ", ".join(f"{key}={each}" for key, each in content.items()) or "not said",
        "common state": ", ".join(found["common"]) or "none",
        "tensors": f"{totals['tensors']} in {totals['shards']} shards, "
        + decimal(totals["tensor_bytes"]),
        "objects": f"{totals['objects']}, {decimal(totals['object_bytes'])}",
    }.items():
        facts.add_row(name, _plain(value))
    console = Console()
    console.print(facts, highlight=False)
    table = _table("tensor", "shape", "dtype", "cut", "size", right=(4,))
    for row in found["tensors"][:rows]:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        table.add_row(_plain(row["key"]), shape, row["dtype"], row["cut"], decimal(row["bytes"]))
    _list(console, table, len(found["tensors"]), rows)
    table = _table("object", "entries", "size", right=(1, 2))
    for row in found["objects"][:rows]:
        table.add_row(_plain(row["key"]), str(row["entries"]), decimal(row["bytes"]))
    _list(console, table, len(found["objects"]), rows)


def _list(console: Console, table: Table, total: int, rows: int | None) -> None:
    if not total:
        return
    console.print()
    console.print(table)
    if rows is not None and total > rows:
        console.print(f"... and {total - rows} more; --all lists them", style="dim")


def _table(*names: str, right: Sequence[int] = ()) -> Table:
    from rich.table import Table  # imported here, so that other commands of megapg start faster

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(names):
        # Names of tensors are long, and must not be cut: they wrap, and other columns do not.
        wraps = name in ("tensor", "object", "state", "saved by")
        table.add_column(
            name, justify="right" if number in right else "left", overflow="fold", no_wrap=not wraps
        )
    return table


def _say(report: Report) -> None:
    note = "" if report.manifest else ", no manifest to compare with"
    what = f"{report.path.name}: {report.files} files, {decimal(report.size)}{note}"
    say(*(("good ", "green") if report.good else ("bad ", "red")), _plain(what))
    lines = [*report.problems]
    if several := report.entries:
        more = f" and {len(several) - _NAMED:,} more" if len(several) > _NAMED else ""
        lines.append(f"damaged entries: {', '.join(several[:_NAMED])}{more}")
    if report.problems and report.weights:
        lines.append("the weights alone still load: load_checkpoint(weights_only=True)")
    elif report.problems:
        lines.append("the weights do not load either: take a copy or an older checkpoint")
    for line in lines:
        Console(soft_wrap=True).print("     ", _plain(line))


def _plain(value: object) -> Text:
    """Return text from an untrusted file without control characters."""
    escaped = (char if char.isprintable() else ascii(char)[1:-1] for char in str(value))
    return Text("".join(escaped))


@contextlib.contextmanager
def _progress(name: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar inside the block, if there is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    ) as progress:
        task = progress.add_task(name)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """End the command with one sentence and exit code 2 if a file can't be read."""
    try:
        yield
    except CheckpointError as error:
        refuse(_plain(error))
    except OSError as error:
        refuse(_plain(f"{error.filename or 'the disk'}: {error.strerror}."))
    except ImportError as error:
        refuse(f"{error}. Checkpoints need torch: pip install 'megapg[torch]'.")
