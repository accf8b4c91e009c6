"""Run the unit tests of a checkout of Megatron-LM twice, on globals and on sessions, and compare.

``python -m tools.upstream CHECKOUT``, or ``make test-upstream MEGATRON=CHECKOUT``. The command
downloads nothing. A test counts as passed if it passes on every rank. The exit code is 1 if a test
passes on globals and not on sessions, and 2 if nothing could be compared.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, NoReturn
from xml.etree import ElementTree

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tools.upstream import ON_A_SESSION

# These folders come after the checkout, which has its own packages `tools` and `tests`. Other
# packages that upstream's tests need must be on the caller's path.
_OURS = (Path(__file__).parent, Path(__file__).parents[2])
_UNIT_TESTS = Path("tests", "unit_tests")
_SHARED = ("test_utilities", "conftest")  # imported by every test
_TOO_SLOW = "too slow"
_IMPORTED = """
import sys
from unittest.mock import MagicMock
sys.modules.update({{name: MagicMock(__path__=[]) for name in {}}})
import megapg_upstream, {}
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one file, on globals or on sessions.

    Attributes:
        passed: the tests that pass on every rank.
        why_none: "too slow", or why no test could be collected; else empty.
    """

    passed: frozenset[str] = frozenset()
    why_none: str = ""


def environment(checkout: Path) -> dict[str, str]:
    """Return the environment of upstream's tests, with downloads from Hugging Face disabled."""
    path = [*map(str, (checkout, *_OURS)), os.environ.get("PYTHONPATH", "")]
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    return {
        **os.environ,
        **offline,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }


def why_nothing_runs(checkout: Path) -> str:
    """Return why no test can be collected; empty if tests can be collected."""
    for name in _SHARED:
        if (checkout / _UNIT_TESTS / f"{name}.py").exists():
            module = ".".join([*_UNIT_TESTS.parts, name])
            if reason := _why_not_imported(checkout, module):
                return f"{module} can't be imported by {sys.executable}: {reason}"
    return ""


def _why_not_imported(checkout: Path, module: str) -> str:
    """Return why a module can't be imported, with every package that it lacks."""
    missing: list[str] = []
    while True:
        # What is missing is replaced, so that the import goes on to the next one.
        command = [sys.executable, "-W", "ignore", "-c", _IMPORTED.format(missing, module)]
        ran = subprocess.run(
            command, cwd=checkout, env=environment(checkout), capture_output=True, text=True
        )
        reason = (ran.stderr.strip().splitlines() or ["it says nothing"])[-1]
        absent = re.match(r"ModuleNotFoundError: No module named '([\w.]+)'", reason)
        if ran.returncode and absent and absent[1] not in missing:
            missing.append(absent[1])
            continue
        roots = sorted({each.partition(".")[0] for each in missing})
        if roots:
            return f"there is no {', '.join(roots)}"
        return reason if ran.returncode else ""


def run(
    checkout: Path, file: Path, ranks: int, minutes: float, on_a_session: bool, stop: Event
) -> Outcome:
    """Return the tests of a file that pass on every rank before the time limit."""
    with tempfile.TemporaryDirectory(prefix="megapg-upstream-") as folder, socket.socket() as held:
        # Without it, another process may take the port before rank 0 listens there.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(held.getsockname()[1]), ON_A_SESSION: "1" * on_a_session}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "megapg_upstream"]
        command += ["-p", "no:cacheprovider", "-o", "addopts=", str(file)]
        reports = [Path(folder, f"{rank}.xml") for rank in range(ranks)]
        printed = Path(folder, "printed")
        started = []
        for rank, report in enumerate(reports):
            with open(os.devnull if rank else printed, "wb") as output:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(
                    subprocess.Popen(
                        [*command, f"--junitxml={report}"],
                        cwd=checkout,
                        env={**environment(checkout), **shared, **own},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + minutes * 60
        try:
            while any(each.poll() is None for each in started):
                if stop.wait(0.1):
                    return Outcome(why_none="interrupted")
                if time.monotonic() > deadline:
                    return Outcome(why_none=f"{_TOO_SLOW}, over {minutes:g} minutes")
        finally:
            for each in started:
                each.kill()
                each.wait()
        passed = frozenset.intersection(*map(_passed, reports))
        # pytest's codes: errors while collecting, a wrong call, an internal error.
        failed = started[0].returncode in (2, 3, 4)
        return Outcome(passed, _reason(printed) if failed and not passed else "")


def _passed(report: Path) -> frozenset[str]:
    if not report.exists():
        return frozenset()
    return frozenset(
        f"{case.get('classname')}.{case.get('name')}"
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("failure") is None and case.find("error") is None
        if case.find("skipped") is None
    )


def _reason(printed: Path) -> str:
    """Return the line of pytest's output that says why no test was collected."""
    lines = printed.read_text(errors="replace").splitlines()
    told = [line[1:].strip() for line in lines if re.match(r"E\s+\w", line)]
    return (told or [line for line in lines if line.strip()] or ["it says nothing"])[-1]


def compare(
    checkout: Path, files: list[Path], ranks: int, minutes: float, jobs: int
) -> Mapping[Path, tuple[Outcome, Outcome]]:
    """Return, by file, the outcome on globals and on sessions, and print each as it comes.

    After Ctrl-C, only files with both outcomes are returned.
    """
    console, stop = Console(stderr=True), Event()
    outcomes: dict[tuple[Path, bool], Outcome] = {}
    with Progress(console=console) as progress, ThreadPoolExecutor(jobs) as threads:
        bar = progress.add_task("upstream's tests", total=2 * len(files))

        def one(file: Path, on_a_session: bool) -> Outcome:
            found = run(checkout, file, ranks, minutes, on_a_session, stop)
            outcomes[file, on_a_session] = found  # what is printed counts, also if Ctrl-C follows
            way = "sessions" if on_a_session else "globals"
            said = found.why_none or f"{len(found.passed)} passed"
            progress.console.print(f"{file.relative_to(_UNIT_TESTS)}, on {way}: {said}")
            progress.advance(bar)
            return found

        running = [threads.submit(one, file, way) for file in files for way in (False, True)]
        try:
            # A signal that another thread takes is seen only when this one wakes.
            while wait(running, timeout=1).not_done:
                pass
        except KeyboardInterrupt:
            ended = dict(outcomes)
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            console.print("interrupted; these are the results so far", style="bold red")
        else:
            for each in running:
                each.result()  # raises what a thread raised
            ended = outcomes
        return {
            file: (ended[file, False], ended[file, True])
            for file in files
            if (file, False) in ended and (file, True) in ended
        }


def table(title: str, rows: Mapping[str, Collection[tuple[Outcome, Outcome]]]) -> Table:
    """Count the passed tests by row and way, without empty rows, and the tests of all rows."""
    made = Table(title, "passed on globals", "passed on sessions", box=box.MARKDOWN)
    every = [pair for pairs in rows.values() for pair in pairs]
    for name, pairs in {**rows, "all": every}.items():
        counts = [sum(len(pair[way].passed) for pair in pairs) for way in (0, 1)]
        if any(counts) or name == "all":
            made.add_row(name, *map(str, counts))
    return made


def remarks(found: Mapping[Path, tuple[Outcome, Outcome]]) -> Iterator[str]:
    """Yield each difference, and each file without an outcome."""
    for file, (on_globals, on_sessions) in found.items():
        reasons = {on_globals.why_none, on_sessions.why_none}
        where = {"globals": on_globals, "sessions": on_sessions}
        for on, outcome in {"both": on_globals}.items() if len(reasons) == 1 else where.items():
            if outcome.why_none:
                yield f"{file.relative_to(_UNIT_TESTS)}, on {on}: {outcome.why_none}"
    for what, side in (("only on globals", 0), ("only on sessions", 1)):
        for pair in found.values():
            tests = pair[side].passed - pair[1 - side].passed
            yield from (f"{what}: {test}" for test in sorted(tests))


def main(
    checkout: Annotated[Path, typer.Argument(help="A checkout of Megatron-LM, with its tests.")],
    select: Annotated[
        list[str] | None,
        typer.Option(help="Only files whose path has this in it; several are given one by one."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="How many ranks each test has.", min=1)] = 1,
    minutes: Annotated[float, typer.Option(help="How long a file may take.")] = 5,
    jobs: Annotated[int, typer.Option(help="How many files run at a time.", min=1)] = 2,
) -> None:
    """Run upstream's unit tests on its globals and on sessions, and compare."""
    checkout, wanted = checkout.resolve(), select or [""]
    every = [file.relative_to(checkout) for file in (checkout / _UNIT_TESTS).rglob("test_*.py")]
    files = sorted(
        file
        for file in every
        if any(part in str(file) for part in wanted) and file.stem not in _SHARED
    )
    if not files:
        parts = " or ".join(map(repr, wanted))
        _give_up(f"{checkout}: no tests in {_UNIT_TESTS} with {parts} in their paths.")
    if reason := why_nothing_runs(checkout):
        _give_up(f"{checkout}: {reason}. Put what it misses on the PYTHONPATH, or set PYTHON.")
    found = compare(checkout, files, ranks, minutes, jobs)
    folders: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for file, pair in found.items():
        folders.setdefault(str(file.parent.relative_to(_UNIT_TESTS)), []).append(pair)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(
        table("file", {str(f.relative_to(_UNIT_TESTS)): [pair] for f, pair in found.items()})
    )
    console.print(table("folder", folders))
    for line in remarks(found):
        print(line)
    if not any(on_globals.passed for on_globals, _ in found.values()):
        _give_up("No test passes on globals either, so nothing was compared.")
    raise typer.Exit(any(one.passed - other.passed for one, other in found.values()))


def _give_up(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
