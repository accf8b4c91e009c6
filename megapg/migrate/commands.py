"""The command line: ``megapg check`` and ``megapg explain``."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from megapg.errors import MegapgError
from megapg.migrate.baseline import beyond, gone, read_baseline, write_baseline
from megapg.migrate.config import Config, load_config
from megapg.migrate.index import Findings, find_sites
from megapg.migrate.mapping import Refusal, Replacement
from megapg.migrate.reasons import explain as explanation
from megapg.migrate.sites import Site
from megapg.migrate.source import Problem
from megapg.migrate.tree import by_package

P = ParamSpec("P")

app = typer.Typer(
    help="Find what still reads Megatron's globals, and say what to write instead. Nothing of the "
    "code is imported or run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _command(function: Callable[P, None]) -> Callable[P, None]:
    """Add a command to the app; typer alone would keep the line breaks of its docstring."""
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(text.split()) for text in paragraphs))(function)
    return function


@_command
def check(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files and directories to look into.")
    ],
    from_core: Annotated[
        str | None,
        typer.Option(
            help="The Megatron-core that the code runs on: 0.16, or 0.12-0.16 where it runs on "
            "several. Without it, from-core in \\[tool.megapg], else what the project pins.",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Only what is more than in this file counts: the ratchet for CI."),
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write what is left now to --baseline.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs, on one line.")
    ] = False,
) -> None:
    """List every use of Megatron's globals: what to write instead, or a code for why not.

    Uses are found by what names stand for, through imports, aliases and re-exports. A line with
    "# megapg: keep" is passed over. \\[tool.megapg] in pyproject.toml takes exclude, wrappers (your
    modules that stand for parallel_state) and from-core.

    Exit code 0: nothing left, or nothing more than in the baseline; 1: there is; 2: the paths or
    the settings are no good.

    Example: megapg check src --baseline megapg-baseline.json
    """
    with _refusing():
        if update_baseline and baseline is None:
            raise typer.BadParameter("--update-baseline needs --baseline FILE.")
        missing = [path for path in paths if not path.exists()]
        if missing:
            raise typer.BadParameter(f"{', '.join(map(str, missing))} does not exist.")
        config = load_config(paths[0], from_core)
        with _progress(shown=not as_json) as advance:
            findings = find_sites(paths, config, advance)
        left = [site for site in findings.sites if not site.keep]
        counted: Sequence[Site] = left
        fewer = 0
        if baseline is not None and update_baseline:
            write_baseline(baseline, left)
            counted = ()
        elif baseline is not None:
            allowed = read_baseline(baseline)
            counted, fewer = beyond(left, allowed), gone(left, allowed)
        if as_json:
            _print_json(findings, left, counted, config)
        else:
            _show(findings, left, counted, config, baseline, fewer)
    if counted:
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


# --- reports --------------------------------------------------------------------------------------


def _show(
    findings: Findings,
    left: Sequence[Site],
    counted: Sequence[Site],
    config: Config,
    baseline: Path | None,
    fewer: int,
) -> None:
    out = Console(soft_wrap=True, highlight=False)
    for problem in findings.problems:
        _line(out, _place(problem), "yellow", "not looked into: " + problem.message)
    for site in counted:
        if site.replacement:
            _line(out, site.place, "green", f"{_one_line(site.text)} -> {site.replacement}", site)
        else:
            _line(out, site.place, "red", f"{_one_line(site.text)} [{site.reason}]", site)
    if left:
        out.print(_burn_down(left))
    read_as = _versions(config)
    kept = len(findings.sites) - len(left)
    said = [f"{_count(findings.files, 'file')}, {_count(len(left), 'use')} left"]
    if kept:
        said.append(f"{kept} kept")
    if findings.problems:
        said.append(f"{_count(len(findings.problems), 'file')} not looked into")
    if baseline is not None and fewer:
        said.append(f"{fewer} fewer than in {baseline}: lower it with --update-baseline")
    if baseline is not None:
        said.append(f"{len(counted)} more than in {baseline}")
    out.print(Text(f"{'; '.join(said)}. Read as Megatron-core {read_as}."))


def _line(out: Console, place: str, style: str, text: str, site: Site | None = None) -> None:
    line = Text(f"{place}: ", style="bold")
    line.append(text, style=style)
    if site is not None and (note := _note(site)):
        line.append(f"  {note}", style="dim")
    out.print(line)


def _note(site: Site) -> str:
    if isinstance(site.answer, Replacement):
        return f"[{site.answer.caution}]" if site.answer.caution else ""
    return site.answer.detail


def _burn_down(left: Sequence[Site]) -> Table:
    table = Table(title="left, by package", title_justify="left", pad_edge=False)
    for heading in ("package", "uses", "with a replacement", "without"):
        table.add_column(heading, justify="left" if heading == "package" else "right")
    total = by_package(Counter(site.file for site in left))
    served = by_package(Counter(site.file for site in left if site.replacement))
    for package, count in sorted(total.items(), key=lambda row: (-row[1], row[0])):
        with_one = served.get(package, 0)
        table.add_row(Text(package), str(count), str(with_one), str(count - with_one))
    if len(total) > 1:
        with_one = sum(served.values())
        table.add_row("all", str(len(left)), str(with_one), str(len(left) - with_one))
    return table


def _print_json(
    findings: Findings, left: Sequence[Site], counted: Sequence[Site], config: Config
) -> None:
    new = set(map(id, counted))
    report = {
        "versions": [f"0.{version}" for version in config.versions],
        "versions_from": config.versions_from,
        "files": findings.files,
        "sites": [{**_described(site), "counts": id(site) in new} for site in left],
        "kept": len(findings.sites) - len(left),
        "problems": [
            {"file": problem.file, "line": problem.line, "message": problem.message}
            for problem in findings.problems
        ],
        "by_package": by_package(Counter(site.file for site in left)),
    }
    typer.echo(json.dumps(report))


def _described(site: Site) -> dict[str, object]:
    return {
        "file": site.file,
        "line": site.span.line,
        "column": site.span.column,
        "end_line": site.span.end_line,
        "end_column": site.span.end_column,
        "start": site.span.start,
        "stop": site.span.stop,
        "exact": site.exact,
        "name": site.name,
        "kind": str(site.kind),
        "text": site.text,
        "function": site.function,
        "class": site.class_name,
        "replacement": site.replacement or None,
        "reason": site.reason or None,
        "detail": site.answer.detail if isinstance(site.answer, Refusal) else "",
        "caution": site.answer.caution if isinstance(site.answer, Replacement) else "",
        "carriers": [
            {
                "kind": carrier.kind,
                "expression": carrier.expression,
                "origin": carrier.origin,
                "may_be_none": carrier.may_be_none,
            }
            for carrier in site.carriers
        ],
    }


def _place(problem: Problem) -> str:
    return f"{problem.file}:{problem.line}" if problem.line else problem.file


def _versions(config: Config) -> str:
    first, last = config.versions[0], config.versions[-1]
    numbers = f"0.{first}" if first == last else f"0.{first} to 0.{last}"
    return f"{numbers} ({config.versions_from})"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


@contextlib.contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Give a function that is told how many files are done, and draw it on a terminal."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda done, total: None
        return
    columns = (TextColumn("looking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
