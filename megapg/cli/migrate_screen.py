"""The report for people: a line for every use that counts, then tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megapg.migrate.edit.mixing import GLOBALS
from megapg.migrate.python.source import Problem
from megapg.migrate.reasons import explain
from megapg.migrate.report.outcome import Entry, Report, burn_down, one_line, shortened

_ROWS = 20  # of a long table
_FEW = 5  # of what one does by hand, one after the other
_WIDE = 200  # where nobody says how wide the screen is
_NAMESAKE = (
    "the project's own {name}, and nothing here imports megatron.core: its uses are left alone. If "
    "it stands for Megatron-core's parallel_state, --wrapper {name} (or wrappers in "
    "[tool.megapg]) says so."
)
_OLD_CORE = (
    "the tree's own Megatron-core is older than 0.12. Where nothing is passed, what megapg migrate "
    "writes asks that copy's getters, as before; sessions, and the stages of a collection that is "
    "passed, need a newer one (UnsupportedVersionError): bring that copy up to 0.12 first"
)
_DIFF_STYLES = {"@": "cyan", "+": "green", "-": "red"}


def screen(stderr: bool = False) -> Console:
    """What to print on. Nothing is cut where it is no terminal."""
    stream: TextIO = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):  # names of files may be no text
        stream.reconfigure(errors="backslashreplace")
    console = Console(stderr=stderr, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def show(out: Console, report: Report, entries: Iterable[Entry], title: str) -> None:
    """What there is to do: problems, the uses that count, the table by package.

    Args:
        out: the screen.
        report: the outcome.
        entries: those that count.
        title: of the table.
    """
    for each in report.findings.namesakes:
        place = os.path.relpath(each.path, report.config.root)
        _line(out, place, "yellow", _NAMESAKE.format(name=each.name))
    if report.config.old_core:
        _line(out, report.config.old_core, "yellow", _OLD_CORE)
    show_problems(out, report.problems, f"{report.problem}: " if report.problem else "")
    for entry in entries:
        show_use(out, entry)
    if report.entries:
        rows = [(row.package, row.uses, *row.fates) for row in burn_down(report)]
        _table(out, title, ("package", "uses", *report.columns), rows)


def show_use(out: Console, entry: Entry) -> None:
    """One use: what is written in its place, or why nothing is."""
    if entry.instead:
        written = f"{shortened(entry.site.text)} -> {entry.instead}"
        note = f"[{entry.note}]" if entry.note else ""
        _line(out, entry.site.place, "green", written, note)
    else:
        written = f"{shortened(entry.site.text)} [{entry.reason}]"
        _line(out, entry.site.place, "red", written, entry.note, one_line(entry.suggestion))


def show_noticed(out: Console, report: Report) -> None:
    """What tests notice of the rewrite of the source."""
    for each in report.noticed:
        _line(out, f"{each.file}:{each.line}", "yellow", each.what, "", each.instead)


def show_callees(out: Console, report: Report) -> None:
    """What still has the globals asked, by functions that have a collection or a model, or has a
    model asked by functions that ask the globals.
    """
    for each in report.callees:
        other = "what it is passed" if each.asks == GLOBALS else GLOBALS
        what = f"{each.function} asks {each.asks}, and {each.callee} has {other} asked for "
        what += f"{each.what}, at {each.place}"
        _line(out, f"{each.file}:{each.line}", "yellow", what, "", each.instead)


def show_problems(out: Console, problems: Iterable[Problem], said: str = "") -> None:
    """Files that something is wrong with, and what; each with some words before it."""
    for problem in problems:
        _line(out, _place(problem), "yellow", said + problem.message)


def show_reasons(out: Console, report: Report) -> None:
    """What is left, by reason."""
    rows = [(code, uses, explain(code).title) for code, uses in report.reasons.items()]
    if rows:
        _table(
            out, "left, by reason (megapg explain CODE)", ("code", "uses", "what it means"), rows
        )


def show_roots(out: Console, report: Report) -> None:
    """Where the globals are still turned to, those that serve most first."""
    roots = sorted(report.roots, key=lambda root: -root.serves)
    if not roots:
        return
    title = "turns to the globals where nothing is passed"
    if len(roots) > _ROWS:
        title += f" ({_ROWS} of {len(roots)}; all with --json)"
    rows = [
        (f"{root.file}: {root.function or 'module level'}", root.serves, root.why)
        for root in roots[:_ROWS]
    ]
    _table(out, title, ("function", "uses", "where its callers end"), rows)


def show_starts(out: Console, report: Report) -> None:
    """Where to pass a collection so that most uses no longer turn to the globals."""
    rows = [
        (f"{start.function} ({start.file}:{start.line})", start.serves, _listed(start.places))
        for start in report.starts[:_FEW]
    ]
    if rows:
        title = "pass pg_collection= here, and so many uses no longer turn to the globals"
        _table(out, title, ("to", "uses", "called at"), rows)


def _listed(places: Sequence[str]) -> str:
    if not places:
        return "no place in these files"
    more = f" and {len(places) - 2} more" if places[2:] else ""
    return ", ".join(places[:2]) + more


def show_diff(lines: Sequence[bytes]) -> None:
    """A diff on standard output: in colours on a terminal, its bytes elsewhere."""
    if not sys.stdout.isatty():  # FORCE_COLOR would make a patch that doesn't apply
        typer.get_binary_stream("stdout").writelines(lines)
        return
    drawn = Text()
    for number, line in enumerate(lines):
        text = line.decode(errors="replace")
        style = "bold" if number < 2 else _DIFF_STYLES.get(text[0], "")
        drawn.append(text, style)
    screen().print(drawn, end="")


def _line(out: Console, place: str, style: str, text: str, note: str = "", do: str = "") -> None:
    line = Text(f"{place}: ", style="bold")
    line.append(text, style=style)
    if note:
        line.append(f"  {note}", style="dim")
    if do:
        line.append(f"  -> {do}", style="green")
    out.print(line)


def _table(
    out: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    table = Table(title=title, title_justify="left", pad_edge=False)
    for heading, example in zip(headings, rows[0], strict=True):
        table.add_column(heading, justify="right" if isinstance(example, int) else "left")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    out.print(table)


def _place(problem: Problem) -> str:
    return f"{problem.file}:{problem.line}" if problem.line else problem.file
