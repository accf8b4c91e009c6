"""Run the unit tests of a checkout of Megatron-LM twice, on globals and on sessions, and compare.

``python -m tools.upstream CHECKOUT``, or ``make test-upstream MEGATRON=CHECKOUT``. Nothing is
fetched. A test counts as passed where it passes on every rank. The exit code is 1 where one passes
on globals and not on sessions.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tools.upstream import ON_A_SESSION

# Behind the checkout, which has a package `tools` and a package `tests` of its own.
_OURS = (Path(__file__).parent, Path(__file__).parents[2])
_THEIRS = [
    path for path in [os.environ.get("PYTHONPATH")] if path
]  # what upstream's tests need, for example
_UNIT_TESTS = Path("tests", "unit_tests")


def run(checkout: Path, file: Path, ranks: int, minutes: float, on_a_session: bool) -> set[str]:
    """The tests of a file that pass on every rank; what has not ended in time has not passed."""
    with tempfile.TemporaryDirectory(prefix="megapg-upstream-") as folder:
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(_free_port()), ON_A_SESSION: "1" * on_a_session}
        shared |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([*map(str, (checkout, *_OURS)), *_THEIRS]),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "megapg_upstream"]
        command += ["-p", "no:cacheprovider", "-o", "addopts=", str(file)]
        reports = [Path(folder, f"{rank}.xml") for rank in range(ranks)]
        started = [
            subprocess.Popen(
                [*command, f"--junitxml={report}"],
                cwd=checkout,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for rank, report in enumerate(reports)
        ]
        try:
            for each in started:
                each.wait(minutes * 60)
        except subprocess.TimeoutExpired:
            return set()
        finally:
            for each in started:
                each.kill()
                each.wait()
        return set.intersection(*map(_passed, reports))


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


def _passed(report: Path) -> set[str]:
    if not report.exists():
        return set()
    return {
        f"{case.get('classname')}.{case.get('name')}"
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("failure") is None and case.find("error") is None
        if case.find("skipped") is None
    }


def compare(
    checkout: Path, files: list[Path], ranks: int, minutes: float, jobs: int
) -> Mapping[Path, tuple[set[str], set[str]]]:
    """Of each file the tests that pass on globals, and those that pass on sessions."""
    with Progress(console=Console(stderr=True)) as progress, ThreadPoolExecutor(jobs) as threads:
        bar = progress.add_task("upstream's tests", total=2 * len(files))

        def one(file: Path, on_a_session: bool) -> set[str]:
            found = run(checkout, file, ranks, minutes, on_a_session)
            progress.advance(bar)
            return found

        both = [[threads.submit(one, file, way) for way in (False, True)] for file in files]
        return {
            file: (on_globals.result(), on_sessions.result())
            for file, (on_globals, on_sessions) in zip(files, both, strict=True)
        }


def main(
    checkout: Annotated[Path, typer.Argument(help="A checkout of Megatron-LM, with its tests.")],
    select: Annotated[str, typer.Option(help="Only files whose path has this in it.")] = "",
    ranks: Annotated[int, typer.Option(help="How many ranks each test has.", min=1)] = 1,
    minutes: Annotated[float, typer.Option(help="How long a file may take.")] = 5,
    jobs: Annotated[int, typer.Option(help="How many files run at a time.", min=1)] = 2,
) -> None:
    """Run upstream's unit tests on its globals and on sessions, and compare."""
    checkout = checkout.resolve()
    files = sorted(
        file.relative_to(checkout)
        for file in (checkout / _UNIT_TESTS).rglob("test_*.py")
        if select in str(file.relative_to(checkout)) and file.name != "test_utilities.py"
    )
    if not files:
        print(
            f"{checkout}: no tests in {_UNIT_TESTS} with {select!r} in their paths", file=sys.stderr
        )
        raise typer.Exit(2)
    found = compare(checkout, files, ranks, minutes, jobs)
    table = Table("file", "passed on globals", "passed on sessions", box=box.MARKDOWN)
    for file, (on_globals, on_sessions) in found.items():
        if on_globals or on_sessions:
            table.add_row(
                str(file.relative_to(_UNIT_TESTS)), *map(str, map(len, (on_globals, on_sessions)))
            )
    totals = [sum(len(each[way]) for each in found.values()) for way in (0, 1)]
    table.add_row("all", *map(str, totals))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    lost = [
        test
        for on_globals, on_sessions in found.values()
        for test in sorted(on_globals - on_sessions)
    ]
    won = [
        test
        for on_globals, on_sessions in found.values()
        for test in sorted(on_sessions - on_globals)
    ]
    for what, tests in (("only on globals", lost), ("only on sessions", won)):
        for test in tests:
            print(f"{what}: {test}")
    if not totals[0]:
        one = _UNIT_TESTS / "test_parallel_state.py"
        print(
            f"No test passes on globals either, so nothing was compared. `pytest {one}` in "
            f"{checkout} says why; put what it misses on the PYTHONPATH.",
            file=sys.stderr,
        )
    raise typer.Exit(bool(lost) or not totals[0])


if __name__ == "__main__":
    typer.run(main)
