"""``python -m benchmarks.chains``: run many chains of checkpoints, and count their outcomes.

The chains are those of the tests, in ``tests/support``. Each outcome is appended to a file as one
line of JSON, so an interrupted run goes on where it ended.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.parity import SUPPORT
from benchmarks.table import Table
from megapg.errors import RankFailedError

app = typer.Typer(add_completion=False)

KINDS = ("exact", "rounded", "apart", "refused", "not built", "wrong")
GROUPINGS = {
    "model": "model",
    "trains": "parameters that train",
    "optimizer": "optimizer",
    "form": "form of the state",
    "dtype": "type of the parameters",
}
STAND_INS = ("te", "apex", "aware", "offload")
"""Optimizers of these names are stand-ins of the real classes, which need a GPU."""

_BATCH = 12


@app.command()
def main(
    count: Annotated[int, typer.Option(min=1, help="The number of chains.")] = 300,
    seed: Annotated[str, typer.Option(help="The seed of the draw.")] = "0",
    lines: Annotated[
        Path, typer.Option(dir_okay=False, help="The file with an outcome in each line.")
    ] = Path("chains.jsonl"),
    seconds: Annotated[
        float, typer.Option(help="Start no further chains after this time.")
    ] = float("inf"),
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="A Markdown file to write.")
    ] = None,
) -> None:
    """Train, save and load in other layouts, and compare everything bit for bit."""
    sys.path.insert(0, str(SUPPORT))  # the ranks get this path, too
    model: Any = importlib.import_module("chain_model")
    console = Console(highlight=False, soft_wrap=True)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    drawn = list(dict.fromkeys(model.seeded_chains(seed, count)))
    until = time.monotonic() + seconds
    for outcome in _run(drawn, lines, until):
        console.print(f"{outcome['kind']:9} {outcome['seconds']:5.1f} s  {outcome['chain']}")
        if outcome["kind"] == "wrong":
            console.print(f"    {outcome['where']}: {outcome['reason']}", markup=False)
    told = _read(lines)
    found = {each: told[repr(each)] for each in drawn if repr(each) in told}
    tables = [table_of(found), reasons_of(found)]
    for table in tables:
        table.print(console)
    if output is not None:
        output.write_text("\n\n".join(table.markdown() for table in tables) + "\n")


def _run(drawn: Sequence[Any], lines: Path, until: float) -> Iterator[Mapping[str, Any]]:
    """Run the chains that the file lacks, a few in one set of processes, and yield outcomes."""
    chains: Any = importlib.import_module("chains")
    left = [each for each in drawn if repr(each) not in _read(lines)]
    fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
    while left and time.monotonic() < until:
        batch = left[:_BATCH]
        with tempfile.TemporaryDirectory(dir=fast) as root:
            try:
                chains.run_chains(batch, root, str(lines.absolute()))
            except RankFailedError as error:
                # The chain after the last recorded one ended its ranks.
                first = next(each for each in batch if repr(each) not in _read(lines))
                lost = {"kind": "wrong", "where": "ranks", "reason": str(error), "seconds": 0.0}
                with lines.open("a") as file:
                    file.write(json.dumps({"chain": repr(first), **lost}) + "\n")
        told = _read(lines)
        yield from (told[repr(each)] for each in batch if repr(each) in told)
        left = [each for each in left if repr(each) not in told]


def _read(lines: Path) -> dict[str, Mapping[str, Any]]:
    """Return the outcomes of the file, by the chain's text."""
    if not lines.exists():
        return {}
    read = (json.loads(line) for line in lines.read_text().splitlines())
    return {each["chain"]: each for each in read}


def table_of(found: Mapping[Any, Mapping[str, Any]]) -> Table:
    """Return the counts of the outcomes, for all chains and for each value of each setting."""
    rows = [("all", *_counts(found.values()))]
    for name, words in GROUPINGS.items():
        for value in dict.fromkeys(sorted(str(getattr(each, name)) for each in found)):
            some = [o for each, o in found.items() if str(getattr(each, name)) == value]
            mark = " (stand-in)" if name == "optimizer" and value.startswith(STAND_INS) else ""
            rows.append((f"{words}: {value}{mark}", *_counts(some)))
    return Table(
        "Chains of checkpoints: train, save and load in three layouts, and train on",
        ("chains", "all", *KINDS),
        tuple(rows),
        (_note(found),),
    )


def reasons_of(found: Mapping[Any, Mapping[str, Any]]) -> Table:
    """Return the reasons of all chains that are not exact, without numbers, most common first."""
    reasons = Counter(
        (each["kind"], _short(each))
        for each in found.values()
        if each["kind"] not in ("exact", "rounded")
    )
    rows = tuple(
        (f"{kind}: {reason}", str(count)) for (kind, reason), count in reasons.most_common()
    )
    return Table("Why chains are not exact", ("reason", "chains"), rows)


def _short(outcome: Mapping[str, Any]) -> str:
    reason = re.sub(
        r"(saving|loading) (iteration \d+ (to|from) )?\S+( failed)?:? ?", "", outcome["reason"]
    )
    reason = re.sub(r"\S*/\S*", "...", re.sub(r"^rank \d+: ", "", reason))
    return f"{outcome['where']}: {re.sub(r'[0-9]+', 'N', reason)[:140]}"


def _counts(outcomes: Any) -> tuple[str, ...]:
    kinds = [each["kind"] for each in outcomes]
    return (str(len(kinds)), *(str(kinds.count(kind)) for kind in KINDS))


def _note(found: Mapping[Any, Mapping[str, Any]]) -> str:
    versions = [f"{each} {importlib.metadata.version(each)}" for each in ("megatron-core", "torch")]
    mean = sum(each["seconds"] for each in found.values()) / max(1, len(found))
    return (
        f"`python -m benchmarks.chains --count {len(found)}`, {datetime.date.today()}, "
        f"{', '.join(versions)}; {mean:.1f} s for a chain on "
        "one to four gloo ranks. Stand-ins compute on the CPU what the real classes compute on a "
        "GPU. A refused chain left everything as it was, and its last checkpoint loads."
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.chains")
