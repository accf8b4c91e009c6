"""Merges the accounts of all ranks into one report; equal facts and findings are merged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import megapg
from megapg.tools.doctor.account import Finding, Level, Row
from megapg.tools.doctor.across import Gathering, Located, compare

SCHEMA_VERSION = 1
"""The version of ``--json``. It grows if a key is removed or changes its meaning."""


@dataclass(frozen=True)
class Value:
    """A value of a fact, and the ranks that have it."""

    ranks: tuple[int, ...]
    text: str
    value: Mapping[str, object] | bool | int | str  # the data of the text, or the text again


@dataclass(frozen=True)
class Fact:
    """One fact over all ranks."""

    section: str  # its topic
    name: str  # its subject
    differs: bool  # True if ranks differ although they must not
    # the different values; a rank without a value, of a variable for example, is in none
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Report:
    """The contents of the report of ``megapg doctor``."""

    launcher: str  # the launcher of the ranks
    world_size: int  # the number of ranks
    hosts: Mapping[str, tuple[int, ...]]  # host -> its ranks
    missing: tuple[int, ...]  # ranks that did not come
    findings: tuple[Located, ...]  # the problems and their ranks, the worst first
    facts: tuple[Fact, ...]  # in the order of their display

    @property
    def good(self) -> bool:
        """True if there is no problem; notes don't count."""
        return all(finding.level is Level.NOTE for finding, _ in self.findings)

    def as_json(self) -> dict[str, object]:
        """Return plain data, as described by ``schema.json`` in this package."""
        head = {"schema_version": SCHEMA_VERSION, "megapg": megapg.__version__, "good": self.good}
        findings = [
            {
                "check": finding.check,
                "level": finding.level.value,
                "ranks": ranks,
                "what": finding.what,
                "remedy": finding.remedy,
            }
            for finding, ranks in self.findings
        ]
        return {**head, **asdict(self), "findings": findings}


def merge(gathering: Gathering) -> Report:
    """Return the report on all ranks that came."""
    hosts: dict[str, list[int]] = defaultdict(list)
    findings: dict[Finding, list[int]] = defaultdict(list)
    rows: dict[tuple[str, str], dict[int, Row]] = defaultdict(dict)
    for account in gathering.accounts:
        hosts[account.host].append(account.rank)
        for finding in account.findings:
            findings[finding].append(account.rank)
        for row in account.rows:
            rows[row.section, row.name][account.rank] = row
    everything = [*compare(gathering)]
    everything += [(finding, tuple(ranks)) for finding, ranks in findings.items()]
    sections = list(dict.fromkeys(section for section, _ in rows))
    return Report(
        launcher=gathering.launch.launcher,
        world_size=gathering.launch.world_size,
        hosts={host: tuple(ranks) for host, ranks in hosts.items()},
        missing=gathering.missing,
        findings=tuple(sorted(everything, key=lambda each: list(Level).index(each[0].level))),
        facts=tuple(
            _fact(section, name, found, len(gathering.accounts))
            for wanted in sections
            for (section, name), found in rows.items()
            if section == wanted
        ),
    )


def _fact(section: str, name: str, found: Mapping[int, Row], accounts: int) -> Fact:
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, row in found.items():
        by_text[row.text].append(rank)
    values = []
    for text, ranks in by_text.items():
        data = found[ranks[0]].data
        values.append(Value(tuple(ranks), text, text if data is None else data))
    alike = any(row.alike for row in found.values())
    differs = alike and (len(values) > 1 or len(found) < accounts)
    return Fact(section, name, differs, tuple(values))
