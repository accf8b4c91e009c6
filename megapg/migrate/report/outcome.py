"""The report of a command: every use, and what happens to it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megapg.migrate.config import Config
from megapg.migrate.migration import Found, How, Migration, Problem, Rewritten, Root
from megapg.migrate.uses import Use
from megapg.upstream.mapping import Replacement

LEFT = "left"
REPLACEABLE, NOT_REPLACEABLE = "with a replacement", "without"
_BY_HAND = ("may-be-none", "in-a-string")  # reasons for which the replacement is good advice
_LONG = 120  # characters


@dataclass(frozen=True)
class Entry:
    """One use."""

    use: Use
    fate: str  # one of the report's columns
    instead: str = ""  # the new expression; empty if there is none
    reason: str = ""  # code of the reason why there is none, or why it is not written
    detail: str = ""  # about this use

    @property
    def is_left(self) -> bool:
        """True if the command leaves the use in place."""
        return self.fate in (LEFT, REPLACEABLE, NOT_REPLACEABLE)

    @property
    def suggestion(self) -> str:
        """The expression to write by hand for a use that is left; may be empty."""
        answer = self.use.answer
        if isinstance(answer, Replacement) and self.reason in _BY_HAND:
            return answer.expression
        return ""


@dataclass(frozen=True)
class Report:
    """The outcome of a command."""

    columns: tuple[str, ...]  # what can happen to a use, the best first
    entries: Sequence[Entry]  # by file and position, without uses that have "# megapg: keep"
    found: Found
    problems: Sequence[Problem]
    config: Config
    files: Sequence[Rewritten] = ()
    roots: Sequence[Root] = ()
    # Formatters that are configured but not installed -> number of files.
    unformatted: Mapping[str, int] = field(default_factory=dict)

    @property
    def left(self) -> list[Entry]:
        """Uses that stay."""
        return [entry for entry in self.entries if entry.is_left]

    @property
    def fates(self) -> dict[str, int]:
        """The number of uses for each column."""
        counts = Counter(entry.fate for entry in self.entries)
        return {column: counts[column] for column in self.columns}

    @property
    def reasons(self) -> dict[str, int]:
        """The number of uses for each reason, the most frequent first."""
        return dict(Counter(entry.reason for entry in self.left if entry.reason).most_common())

    @property
    def kept(self) -> int:
        """The number of uses with "# megapg: keep"."""
        return sum(use.keep for use in self.found.uses)


def of_check(checked: Migration, config: Config) -> Report:
    """Return the report of ``megapg check``: uses with a replacement are those of ``migrate``."""
    entries = []
    for left in checked.left:
        entries.append(Entry(left.use, NOT_REPLACEABLE, reason=left.reason, detail=left.detail))
    for served in checked.served:
        answer = served.use.answer
        assert isinstance(answer, Replacement)  # as the use is served
        entries.append(Entry(served.use, REPLACEABLE, instead=answer.expression))
    entries.sort(key=lambda entry: (entry.use.file, entry.use.span))
    columns = (REPLACEABLE, NOT_REPLACEABLE)
    return Report(columns, entries, checked.found, checked.problems, config)


def of_migration(migration: Migration, config: Config, unwritten: Sequence[Problem] = ()) -> Report:
    """Return the report of ``megapg migrate``.

    Args:
        migration: the result of the run.
        config: the settings of the run.
        unwritten: why files could not be written. If there are any, no file was written.
    """
    entries = []
    for left in migration.left:
        entries.append(Entry(left.use, LEFT, reason=left.reason, detail=left.detail))
    for served in migration.served:
        if unwritten:
            entries.append(Entry(served.use, LEFT, reason="unwritten"))
        else:
            entries.append(Entry(served.use, served.how, instead=served.text))
    entries.sort(key=lambda entry: (entry.use.file, entry.use.span))
    return Report(
        columns=(*How, LEFT),
        entries=entries,
        found=migration.found,
        problems=[*migration.problems, *unwritten],
        config=config,
        files=() if unwritten else migration.files,
        roots=() if unwritten else migration.roots,
        unformatted={} if unwritten else migration.unformatted,
    )


@dataclass(frozen=True)
class Row:
    """A line of the table of packages."""

    package: str  # a folder, or ``all``
    uses: int
    fates: tuple[int, ...]  # the number of uses for each of the report's columns


def by_package(report: Report) -> list[Row]:
    """Return the table of packages, those with most uses first. Several packages are summed up."""
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in report.entries:
        packages[entry.use.file.rpartition("/")[0] or "."][entry.fate] += 1
    rows = [
        Row(package, fates.total(), tuple(fates[column] for column in report.columns))
        for package, fates in packages.items()
    ]
    rows.sort(key=lambda row: (-row.uses, row.package))
    if len(rows) > 1:
        rows.append(Row("all", len(report.entries), tuple(report.fates.values())))
    return rows


def versions(config: Config) -> str:
    """Return the versions of Megatron-core, and where they come from."""
    first, last = config.versions[0], config.versions[-1]
    numbers = f"0.{first}" if first == last else f"0.{first} to 0.{last}"
    return f"{numbers} ({config.versions_from})"


def count(number: int, noun: str) -> str:
    """Return ``1 file`` or ``2 files``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shortened(code: str) -> str:
    """Return the start of an expression on one line."""
    code = " ".join(code.split())
    return code if len(code) <= _LONG else f"{code[: _LONG - 3]}..."
