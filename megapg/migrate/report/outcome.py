"""What a report is about, whichever command makes it: every use, and what becomes of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapg.migrate.config import Config
from megapg.migrate.find.index import Findings
from megapg.migrate.find.sites import Site
from megapg.migrate.migration import (
    Callee,
    How,
    Left,
    Migration,
    Noticed,
    Rewritten,
    Root,
    Served,
    Start,
)
from megapg.migrate.python.source import Problem
from megapg.upstream.mapping import Refusal, Replacement

LEFT = "left"
WITH, WITHOUT = "with a replacement", "without"
_UNWRITTEN = "unwritten"
_LONG = 120  # characters: a call with a dozen arguments


@dataclass(frozen=True)
class Entry:
    """One use."""

    site: Site  # what is there before the command
    fate: str  # what becomes of it: its column in the table by package
    instead: str = ""  # what is written in its place, or can be; empty where nothing serves
    reason: str = ""  # code of why nothing serves; empty where something does
    note: str = ""  # what is special about this one; may be empty
    suggestion: str = ""  # what to write by hand; may be empty
    why: str = ""  # it may turn to the globals, as Why says; empty where it never does

    @property
    def left(self) -> bool:
        """Whether it is still there when the command is done, and all is written."""
        return self.fate in (LEFT, WITH, WITHOUT)


@dataclass(frozen=True)
class Report:
    """The outcome of a command."""

    columns: tuple[str, ...]  # the fates that there can be, the best first
    entries: Sequence[Entry]  # every use that is not kept, by file and position
    findings: Findings  # what is in the project
    problems: Sequence[Problem]  # files that could not be looked into, rewritten or written
    config: Config  # what the command was told
    problem: str = ""  # which of the three it is, where there is but one
    files: Sequence[Rewritten] = ()  # those that change
    roots: Sequence[Root] = ()  # where the globals are still turned to
    starts: Sequence[Start] = ()  # where to pass a collection, what serves most first
    noticed: Sequence[Noticed] = ()  # places in tests that notice what becomes of the source
    callees: Sequence[Callee] = ()  # calls of what still asks the globals

    @property
    def left(self) -> list[Entry]:
        """The uses that stay."""
        return [entry for entry in self.entries if entry.left]

    @property
    def served(self) -> list[Entry]:
        """The uses that are rewritten."""
        return [entry for entry in self.entries if not entry.left]

    @property
    def fates(self) -> dict[str, int]:
        """How many uses there are of each."""
        found = Counter(entry.fate for entry in self.entries)
        return {column: found[column] for column in self.columns}

    @property
    def reasons(self) -> dict[str, int]:
        """How many uses are left for each reason, the most frequent first."""
        return dict(Counter(entry.reason for entry in self.left if entry.reason).most_common())


def of_findings(findings: Findings, config: Config) -> Report:
    """What ``megapg check`` reports: nothing is rewritten."""
    entries = [_found(site) for site in findings.sites if not site.keep]
    return Report(
        columns=(WITH, WITHOUT),
        entries=entries,
        findings=findings,
        problems=findings.problems,
        config=config,
        problem="not looked into",
    )


def of_migration(
    migration: Migration, config: Config, unwritten: Mapping[str, Problem] | None = None
) -> Report:
    """What ``megapg migrate`` reports.

    Args:
        migration: what it comes to.
        config: what it was told.
        unwritten: why files could not be written, by their names: their uses are left.
    """
    unwritten = unwritten or {}
    entries = [_served(each, unwritten.get(each.site.file)) for each in migration.served]
    entries += [_left(each) for each in migration.left]
    entries.sort(key=lambda entry: (entry.site.file, entry.site.span.start, entry.site.span.stop))
    return Report(
        columns=(*How, LEFT),
        entries=entries,
        findings=migration.findings,
        problems=[*migration.problems, *unwritten.values()],
        config=config,
        files=[file for file in migration.files if file.file not in unwritten],
        roots=[root for root in migration.roots if root.file not in unwritten],
        starts=[start for start in migration.starts if start.file not in unwritten],
        noticed=migration.noticed,
        callees=migration.callees,
    )


def _found(site: Site) -> Entry:
    answer = site.answer
    if isinstance(answer, Replacement):
        return Entry(site, WITH, instead=answer.expression, note=answer.caution)
    return Entry(site, WITHOUT, reason=answer.reason, note=answer.detail)


def _served(served: Served, problem: Problem | None) -> Entry:
    if problem is not None:
        return Entry(served.site, LEFT, reason=_UNWRITTEN, note=problem.message)
    return Entry(served.site, served.how, instead=served.text, note=served.detail, why=served.why)


def _left(left: Left) -> Entry:
    answer = left.site.answer
    note = left.detail or (answer.detail if isinstance(answer, Refusal) else "")
    return Entry(left.site, LEFT, reason=left.reason, note=note, suggestion=left.suggestion)


@dataclass(frozen=True)
class Row:
    """One line of the table by package."""

    package: str  # a directory, or ``all``
    uses: int  # how many there are
    fates: tuple[int, ...]  # how many of each column, in the report's order


def burn_down(report: Report) -> list[Row]:
    """The uses by package, those with most first; more than one package is added up at the end."""
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in report.entries:
        packages[entry.site.file.rpartition("/")[0] or "."][entry.fate] += 1
    rows = [
        Row(package, fates.total(), tuple(fates[column] for column in report.columns))
        for package, fates in packages.items()
    ]
    rows.sort(key=lambda row: (-row.uses, row.package))
    if len(rows) > 1:
        rows.append(Row("all", len(report.entries), tuple(report.fates.values())))
    return rows


def versions(config: Config) -> str:
    """As which Megatron-core the code was read, and who says so."""
    first, last = config.versions[0], config.versions[-1]
    numbers = f"0.{first}" if first == last else f"0.{first} to 0.{last}"
    return f"{numbers} ({config.versions_from})"


def count(number: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def shortened(text: str) -> str:
    """As much of some code as tells it from others, on one line."""
    text = one_line(text)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
