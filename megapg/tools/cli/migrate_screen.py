"""The report for people: a line for each use, then tables."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megapg.migrate.migration import Root
from megapg.migrate.reasons import explain
from megapg.migrate.report.outcome import Entry, Report, by_package, shortened

_MOST_ROOTS = 20  # rows of the table
_MOST_CALLS = 2  # in a row of it
_WIDTH = 200  # without a terminal
_DIFF_STYLES = {"@": "cyan", "+": "green", "-": "red"}


def screen(*, stderr: bool = False) -> Console:
    """Return the console. Lines are not cut unless it is a terminal."""
    stream: TextIO = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):  # file names may have bytes that are no text
        stream.reconfigure(errors="backslashreplace")
    console = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def show(out: Console, report: Report, entries: Iterable[Entry], title: str) -> None:
    """Print problems, uses, and the table of packages.

    Args:
        out: the console.
        report: the outcome of the command.
        entries: the uses to print.
        title: of the table.
    """
    for problem in report.problems:
        place = f"{problem.file}:{problem.line}" if problem.line else problem.file
        _line(out, place, problem.message, "yellow")
    for entry in entries:
        show_use(out, entry)
    if report.entries:
        rows = [(row.package, row.uses, *row.fates) for row in by_package(report)]
        _table(out, title, ("package", "uses", *report.columns), rows)


def show_use(out: Console, entry: Entry) -> None:
    """Print one use, with its replacement or the reason why it stays."""
    place, text = entry.use.place, shortened(entry.use.text)
    reason = f"[{entry.reason}]" if entry.reason else ""
    if entry.instead:
        _line(out, place, f"{text} -> {' '.join(entry.instead.split())}", "green", reason)
    else:
        instead = entry.suggestion and f"-> {entry.suggestion}"
        _line(out, place, f"{text} {reason}", "red", f"{entry.detail}  {instead}".strip())


def show_reasons(out: Console, report: Report) -> None:
    """Print the table of reasons why uses stay."""
    rows = [(code, uses, explain(code).title) for code, uses in report.reasons.items()]
    _table(out, "left, by reason (megapg explain CODE)", ("code", "uses", "the use"), rows)


def show_roots(out: Console, roots: Sequence[Root]) -> None:
    """Print the functions that read the globals, and the calls that should pass a collection."""
    title = "functions that read the globals, since callers pass no collection"
    if len(roots) > _MOST_ROOTS:
        title += f" ({_MOST_ROOTS} of {len(roots)}; all of them with --json)"
    rows = [
        (
            f"{root.file}{f':{root.line}' if root.line else ''} {root.function or 'module level'}",
            root.uses,
            _advice(root),
        )
        for root in roots[:_MOST_ROOTS]
    ]
    _table(out, title, ("function", "uses", "what to do"), rows)


def _advice(root: Root) -> str:
    if not root.takes:
        return "nothing: it can't take a collection"
    if not root.calls:
        return "pass pg_collection= (no call in these files)"
    more = len(root.calls) - _MOST_CALLS
    rest = f" and {more} more" if more > 0 else ""
    return f"pass pg_collection= at {', '.join(root.calls[:_MOST_CALLS])}{rest}"


def show_diff(lines: Sequence[bytes]) -> None:
    """Print a diff on standard output: coloured on a terminal, else byte for byte."""
    if not sys.stdout.isatty():  # even with FORCE_COLOR: git apply must understand it
        typer.get_binary_stream("stdout").writelines(lines)
        return
    text = Text()
    for number, line in enumerate(lines):
        style = "bold" if number < 2 else _DIFF_STYLES.get(chr(line[0]), "")
        text.append(line.decode(errors="replace"), style)
    screen().print(text, end="")


@contextlib.contextmanager
def progress(command: str) -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that draws progress, if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total: None
        return
    from rich import progress as bars  # takes time to import

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(command, total=None)
        step = ""

        def advance(what: str, done: int, total: int) -> None:
            nonlocal step
            is_new, step = what != step, what  # draw each step once, however short
            title = f"{command}: {what}"
            bar.update(task, description=title, completed=done, total=total, refresh=is_new)

        yield advance


def _line(out: Console, place: str, text: str, style: str, note: str = "") -> None:
    line = Text(f"{place}: ", style="bold")
    line.append(text, style=style)
    if note:
        line.append(f"  {note}", style="dim")
    out.print(line)


def _table(
    out: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    if not rows:
        return
    table = Table(title=title, title_justify="left", pad_edge=False)
    for heading, example in zip(headings, rows[0], strict=True):
        table.add_column(heading, justify="right" if isinstance(example, int) else "left")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    out.print(table)
