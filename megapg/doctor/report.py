"""One report from the accounts of all ranks: equal facts merged, findings too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import megapg
from megapg.doctor.account import Finding, Level, Row
from megapg.doctor.across import Gathering, Located, compare

SCHEMA_VERSION = 1
"""Of ``--json``: a higher one where a key goes or changes its meaning; new ones may come."""


@dataclass(frozen=True)
class Value:
    """A value of a fact, and the ranks that have it."""

    ranks: tuple[int, ...]
    text: str
    value: Mapping[str, object] | bool | int | str  # what the text is made of, or the text again


@dataclass(frozen=True)
class Fact:
    """One fact over all ranks."""

    section: str  # what it belongs to
    name: str  # what it is about
    differs: bool  # it has to be the same on every rank, and is not
    # the different ones; a rank that has none, say of a variable, is in none of them
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Report:
    """What ``megapg doctor`` shows."""

    launcher: str  # what started the ranks
    world_size: int  # how many there are
    hosts: Mapping[str, tuple[int, ...]]  # host -> its ranks
    missing: tuple[int, ...]  # ranks that did not come
    findings: tuple[Located, ...]  # what looks wrong and on which ranks, the worst first
    facts: tuple[Fact, ...]  # in the order in which they are shown

    @property
    def good(self) -> bool:
        """Whether nothing looks wrong; notes don't count."""
        return all(finding.level is Level.NOTE for finding, _ in self.findings)

    def as_json(self) -> dict[str, object]:
        """Plain data, as ``schema.json`` beside this module describes it."""
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
    """The report on everyone who came."""
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
