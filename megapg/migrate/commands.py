"""The command line: ``megapg check``, ``megapg migrate`` and ``megapg explain``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

from megapg.errors import MegapgError
from megapg.migrate import engine
from megapg.migrate.baseline import beyond, gone, read_baseline, write_baseline
from megapg.migrate.config import Config, load_config
from megapg.migrate.index import find_sites
from megapg.migrate.migration import Rewritten, Style
from megapg.migrate.reasons import explain as explanation
from megapg.migrate.report.diff import base_of, unified
from megapg.migrate.report.entries import (
    Entry,
    Report,
    count,
    of_findings,
    of_migration,
    versions,
)
from megapg.migrate.report.screen import screen, show, show_diff, show_reasons, show_roots
from megapg.migrate.report.together import together
from megapg.migrate.source import Problem
from megapg.migrate.write import write_files

P = ParamSpec("P")

_STDOUT = Path("-")

app = typer.Typer(
    help="Move code off Megatron's globals: find what still reads them, rewrite it, and say why "
    "where it can't be. Nothing of the code is imported or run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _command(function: Callable[P, None]) -> Callable[P, None]:
    """Add a command to the app; typer alone would keep the line breaks of its docstring."""
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(text.split()) for text in paragraphs))(function)
    return function


_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Files and directories to look into.")
]
_FromCore = Annotated[
    str | None,
    typer.Option(
        help="The Megatron-core that the code runs on: 0.16, or 0.12-0.16 where it runs on "
        "several. Without it, from-core in \\[tool.megapg], else what the project pins.",
    ),
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, on one line.")]
_Sarif = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write SARIF 2.1.0 for code hosts and editors; - is standard output."
    ),
]


@_command
def check(
    paths: _Paths,
    from_core: _FromCore = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Only what is more than in this file counts: the ratchet for CI."),
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write what is left now to --baseline.")
    ] = False,
    as_json: _AsJson = False,
    sarif: _Sarif = None,
) -> None:
    """List every use of Megatron's globals: what to write instead, or a code for why not.

    Uses are found by what names stand for, through imports, aliases and re-exports. A line with
    "# megapg: keep" is passed over. \\[tool.megapg] in pyproject.toml takes exclude, wrappers (your
    modules that stand for parallel_state), from-core and style.

    Exit code 0: nothing left, or nothing more than in the baseline; 1: there is; 2: the paths or
    the settings are no good.

    Example: megapg check src --baseline megapg-baseline.json
    """
    with _refusing(), _uncollected():
        if update_baseline and baseline is None:
            raise typer.BadParameter("--update-baseline needs --baseline FILE.")
        quiet = _one_document(as_json, sarif)
        config = _config(paths, from_core)
        with _progress("looking") as advance:
            report = of_findings(find_sites(paths, config, advance), config)
        sites = [entry.site for entry in report.entries]
        counted: Sequence[Entry] = report.entries
        fewer = 0
        if baseline is not None and update_baseline:
            write_baseline(baseline, sites)
            counted = ()
        elif baseline is not None:
            allowed = read_baseline(baseline)
            new = set(map(id, beyond(sites, allowed)))
            counted = [entry for entry in report.entries if id(entry.site) in new]
            fewer = gone(sites, allowed)
        if not quiet:
            out = screen()
            show(out, report, counted, "left, by package")
            said = [f"{count(report.looked_at, 'file')}, {count(len(sites), 'use')} left"]
            said += _beside(report)
            if baseline is not None and fewer:
                said.append(f"{fewer} fewer than in {baseline}: lower it with --update-baseline")
            if baseline is not None:
                said.append(f"{len(counted)} more than in {baseline}")
            out.print(Text(f"{'; '.join(said)}. Read as Megatron-core {versions(config)}."))
        _write_documents(report, counted, as_json, sarif)
    if counted:
        raise typer.Exit(1)


@_command
def migrate(
    paths: _Paths,
    write: Annotated[bool, typer.Option("--write", help="Write the files.")] = False,
    from_core: _FromCore = None,
    style: Annotated[
        Style | None,
        typer.Option(
            help="What functions are given: their one group, a collection, or as it suits each. "
            "Without it, style in \\[tool.megapg], else collection.",
        ),
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Rewrite also where it may change what the code does.")
    ] = False,
    atomic: Annotated[
        bool, typer.Option("--atomic", help="With --write: if one file can't be written, none is.")
    ] = False,
    as_json: _AsJson = False,
    sarif: _Sarif = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write a report for a pull request; - is standard output."
        ),
    ] = None,
) -> None:
    """Rewrite uses of Megatron's globals: to a group, a collection or a model that is at hand.

    Without --write nothing is written: the changes are a diff on standard output, for git apply or
    patch -p1, and what is left is reported on standard error. Each file is replaced as a whole or
    not at all, and only what passed verification. A line with "# megapg: keep" stays. To see the
    report alone: megapg migrate src > /dev/null.

    Exit code 0: nothing left; 1: uses are left, or changes not written; 2: the paths or the
    settings are no good, or a file could not be written.

    Example: megapg migrate src --from-core 0.16, and when the diff looks right the same with
    --write
    """
    with _refusing(), _uncollected():
        if atomic and not write:
            raise typer.BadParameter("--atomic needs --write.")
        quiet = _one_document(as_json, sarif, markdown)
        config = _config(paths, from_core)
        with _progress("migrating") as advance:
            migration = engine.migrate(
                paths, config, style=style or config.style, unsafe=unsafe, on_progress=advance
            )
        unwritten = _write(migration.files, atomic) if write else {}
        report = of_migration(migration, config, unwritten)
        summary = _summary(report, write)
        if not quiet:
            if not write:
                base = base_of(report.files, config.root)
                for file in report.files:
                    show_diff(unified(file, base))
            out = screen(stderr=not write)
            show(out, report, report.left, "by package")
            show_reasons(out, report)
            show_roots(out, report)
            out.print(Text(summary))
        _write_documents(report, report.entries, as_json, sarif)
        if markdown is not None:
            from megapg.migrate.report import markdown as markdown_report

            _write_to(markdown, markdown_report.document(report, summary))
    if unwritten:
        raise typer.Exit(2)
    if report.left or (report.files and not write):
        raise typer.Exit(1)


@_command
def explain(
    code: Annotated[str, typer.Argument(help="As megapg check prints it, such as vp-stage.")],
) -> None:
    """Say what a code of a report means, and what to do about it.

    Exit code 0: explained; 2: there is no such code.

    Example: megapg explain stage-default
    """
    with _refusing():
        reason = explanation(code)
        console = Console()
        console.print(Text(f"{reason.code}: {reason.title}", style="bold"))
        console.print(Text(f"\n{reason.why}"))
        console.print(Text(f"\nInstead: {reason.instead}"))


# --- what both commands do ------------------------------------------------------------------------


def _config(paths: Sequence[Path], from_core: str | None) -> Config:
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise typer.BadParameter(f"{', '.join(map(str, missing))} does not exist.")
    return load_config(paths[0], from_core)


def _one_document(as_json: bool, *files: Path | None) -> bool:
    """Whether standard output is a document's; there is room for one."""
    wanted = as_json + sum(file == _STDOUT for file in files)
    if wanted > 1:
        raise typer.BadParameter("only one of --json and the reports to - can be printed.")
    return wanted == 1


def _write_documents(
    report: Report, counted: Sequence[Entry], as_json: bool, sarif: Path | None
) -> None:
    # What a document takes is loaded for it alone: most runs print none.
    if as_json:
        from megapg.migrate.report import as_json as json_report

        typer.echo(json.dumps(json_report.document(report, counted)))
    if sarif is not None:
        from megapg.migrate.report import sarif as sarif_report

        _write_to(sarif, json.dumps(sarif_report.document(report, counted), indent=1) + "\n")


def _write_to(file: Path, text: str) -> None:
    data = text.encode(errors="backslashreplace")  # names of files may be no text
    if file == _STDOUT:
        typer.get_binary_stream("stdout").write(data)
        return
    try:
        file.write_bytes(data)
    except OSError as error:
        raise typer.BadParameter(f"{file} can't be written: {error.strerror}.") from error


def _write(files: Sequence[Rewritten], atomic: bool) -> dict[str, Problem]:
    """Why files could not be written, by their names: those that need each other all or none."""
    unwritten: dict[str, Problem] = {}
    for unit in [files] if atomic else together(files):
        problems = write_files(unit, atomic=True)
        for file in unit if problems else ():
            why = f"is not written, since {problems[0].file} could not be"
            unwritten[file.file] = Problem(file.file, 0, why)
        unwritten |= {problem.file: problem for problem in problems}
    return unwritten


def _summary(report: Report, written: bool) -> str:
    said = [
        f"{count(report.looked_at, 'file')}, {count(len(report.entries), 'use')}: "
        f"{len(report.served):,} {'rewritten' if written else 'can be rewritten'} "
        f"in {count(len(report.files), 'file')}",
        f"{len(report.left):,} left",
        *_beside(report),
    ]
    if report.roots:
        said.append(f"{count(len(report.roots), 'place')} may turn to the globals")
    hint = "" if written or not report.files else " Nothing is written yet: add --write."
    return f"{'; '.join(said)}. Read as Megatron-core {versions(report.config)}.{hint}"


def _beside(report: Report) -> list[str]:
    """What is neither left nor rewritten."""
    said = []
    if report.kept:
        said.append(f"{report.kept} kept")
    if report.problems:
        said.append(f"{count(len(report.problems), 'file')} {report.problem or 'with problems'}")
    return said


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for garbage in circles: among so many nodes of syntax trees, which all
    live until the end, it takes as long as the work itself. Nor when Python ends.
    """
    was_on = gc.isenabled()
    gc.disable()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # not now: in a process that goes on, it stays frozen
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # and so all of it is old, and not looked through at once
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that is told how many files are done, and draw it on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import (  # not for a run that nobody watches
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What megapg raises for the user becomes one line and exit code 2."""
    try:
        yield
    except (MegapgError, typer.BadParameter) as error:
        message = error.message if isinstance(error, typer.BadParameter) else str(error)
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            Text.assemble(("error ", "bold red"), message)
        )
        sys.stdout.flush()
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
