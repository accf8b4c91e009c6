"""One report from the accounts of all ranks: equal facts merged, findings too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import megapg
from megapg.doctor.account import Account, Finding, Level, Row
from megapg.doctor.across import Gathering, Located, compare


@dataclass(frozen=True)
class Value:
    """A value of a fact, and the ranks that have it."""

    ranks: tuple[int, ...]
    text: str
    data: Mapping[str, object] | bool | int | None


@dataclass(frozen=True)
class Fact:
    """One fact over all ranks.

    Attributes:
        section: what it belongs to.
        name: what it is about.
        values: the different ones; a rank that has none, say of a variable, is in none of them.
        differs: it has to be the same on every rank, and is not.
    """

    section: str
    name: str
    values: tuple[Value, ...]
    differs: bool


@dataclass(frozen=True)
class Report:
    """What ``megapg doctor`` shows.

    Attributes:
        launcher: what started the ranks.
        world_size: how many there are.
        hosts: host -> its ranks.
        missing: ranks that did not come.
        facts: in the order in which they are shown.
        findings: what looks wrong and on which ranks, the worst first.
    """

    launcher: str
    world_size: int
    hosts: Mapping[str, tuple[int, ...]]
    missing: tuple[int, ...]
    facts: tuple[Fact, ...]
    findings: tuple[Located, ...]

    @property
    def good(self) -> bool:
        """Whether nothing looks wrong; notes don't count."""
        return all(finding.level is Level.NOTE for finding, _ in self.findings)

    def as_json(self) -> dict[str, object]:
        """Plain data; the keys below are stable.

        ``megapg``: its version. ``launcher``, ``world_size``, ``hosts`` (host -> ranks),
        ``missing`` (ranks), ``good``. ``findings``: a list of ``check``, ``level`` ("error",
        "warning" or "note"), ``ranks``, ``what`` and ``remedy``. ``facts``: a list of ``section``,
        ``name``, ``differs`` and ``values``, a list of ``ranks``, ``text`` and ``value`` (the text
        again, or what it is made of).
        """
        return {
            "megapg": megapg.__version__,
            "launcher": self.launcher,
            "world_size": self.world_size,
            "hosts": {host: list(ranks) for host, ranks in self.hosts.items()},
            "missing": list(self.missing),
            "good": self.good,
            "findings": [
                {
                    "check": finding.check,
                    "level": finding.level.value,
                    "ranks": list(ranks),
                    "what": finding.what,
                    "remedy": finding.remedy,
                }
                for finding, ranks in self.findings
            ],
            "facts": [
                {
                    "section": fact.section,
                    "name": fact.name,
                    "differs": fact.differs,
                    "values": [
                        {
                            "ranks": list(value.ranks),
                            "text": value.text,
                            "value": value.text if value.data is None else value.data,
                        }
                        for value in fact.values
                    ],
                }
                for fact in self.facts
            ],
        }


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
    everything = [
        *compare(gathering),
        *((finding, tuple(ranks)) for finding, ranks in findings.items()),
    ]
    sections = list(dict.fromkeys(section for section, _ in rows))
    return Report(
        launcher=gathering.launch.launcher,
        world_size=gathering.launch.world_size,
        hosts={host: tuple(ranks) for host, ranks in hosts.items()},
        missing=gathering.missing,
        facts=tuple(
            _fact(section, name, found, gathering.accounts)
            for wanted in sections
            for (section, name), found in rows.items()
            if section == wanted
        ),
        findings=tuple(sorted(everything, key=lambda each: list(Level).index(each[0].level))),
    )


def _fact(section: str, name: str, found: Mapping[int, Row], accounts: tuple[Account, ...]) -> Fact:
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, row in found.items():
        by_text[row.text].append(rank)
    alike = any(row.alike for row in found.values())
    return Fact(
        section=section,
        name=name,
        values=tuple(
            Value(tuple(ranks), text, found[ranks[0]].data) for text, ranks in by_text.items()
        ),
        differs=alike and (len(by_text) > 1 or len(found) < len(accounts)),
    )
