"""The report for people: the verdict, then the facts, one per line."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from megapg.launch.process import ranks_said
from megapg.tools.doctor.account import Level
from megapg.tools.doctor.report import Fact, Report

_STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.NOTE: "cyan"}
_VALUES = 8  # number of values of one fact that are shown; --json has all


def show(report: Report) -> None:
    """Print the report to the standard output."""
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(soft_wrap=True)
    console.print(Text(_headline(report), style="bold"))
    _judge(console, report)
    for section, facts in groupby(report.facts, key=lambda fact: fact.section):
        console.print()
        console.print(Text(section, style="bold"))
        for fact in facts:
            for line in _lines(fact, report.world_size):
                _print_indented(console, line, "yellow" if fact.differs else "")


def _headline(report: Report) -> str:
    ranks = f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"
    hosts = f"{len(report.hosts)} host{'s' if len(report.hosts) > 1 else ''}"
    return f"megapg doctor: {ranks} on {hosts}"


def _lines(fact: Fact, world_size: int) -> list[Text]:
    mark = "  (differs)" if fact.differs else ""
    return [
        Text(f"{fact.name}: {value}{f'  [{ranks}]' if ranks else ''}{mark}")
        for value, ranks in _shown(fact, world_size)
    ]


def _shown(fact: Fact, world_size: int) -> list[tuple[Text, str]]:
    """Return the values with their ranks. The ranks are left out if all have the same value."""
    shown = [
        (_plain(each.text), "" if len(each.ranks) == world_size else ranks_said(each.ranks))
        for each in fact.values[:_VALUES]
    ]
    if (more := len(fact.values) - _VALUES) > 0:
        shown.append((Text(f"and {more} other values; --json has them"), ""))
    return shown


def _judge(console: Console, report: Report) -> None:
    """Print the verdict in one line, then the findings."""
    if report.good:
        console.print(Text("good", style="bold green"), "no problem found")
    else:
        counts = Counter(finding.level for finding, _ in report.findings)
        counted = [
            f"{count} {level}{'s' if count > 1 else ''}"
            for level in (Level.ERROR, Level.WARNING)
            if (count := counts[level])
        ]
        worst = report.findings[0][0].level
        console.print(Text("bad", style=_STYLES[worst]), ", ".join(counted), highlight=False)
    for finding, ranks in report.findings:
        who = "" if report.world_size == 1 or not ranks else f" [{ranks_said(ranks)}]"
        line = Text.assemble((finding.level.value, _STYLES[finding.level]), f"{who} ")
        console.print(line.append_text(_plain(finding.what)))
        _print_indented(console, Text("do: ").append_text(_plain(finding.remedy)))


def _print_indented(console: Console, line: Text, style: str = "") -> None:
    # On a terminal, all lines of a wrapped text are indented.
    indented = Padding.indent(line, 2) if console.is_terminal else Text("  ").append(line)
    console.print(indented, style=style)


def _plain(value: str) -> Text:
    """Return the value of an environment variable without control characters."""
    return Text("".join(char if char.isprintable() else ascii(char)[1:-1] for char in value))
