"""The account of one rank: rows of facts, and findings. It travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self


class Level(StrEnum):
    """The severity of a finding. A note does not count as a problem."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """A problem, and its remedy."""

    check: str  # the check that found it, for programs
    level: Level  # the severity
    what: str  # the problem and its consequence
    remedy: str  # the remedy


@dataclass(frozen=True)
class Row:
    """One fact."""

    section: str  # its topic: ``"software"``
    name: str  # its subject: ``"torch"``
    text: str  # the fact for people
    # the fact for programs, if it is more than the text
    data: Mapping[str, object] | bool | int | None = None
    alike: bool = False  # True if it must be the same on every rank


@dataclass(frozen=True)
class Account:
    """The facts and findings of one rank."""

    rank: int  # its global rank
    host: str  # its host
    device: str  # a unique name of its accelerator; empty without one
    rows: tuple[Row, ...]  # the facts
    findings: tuple[Finding, ...]  # its problems

    def get(self, section: str, name: str) -> str | None:
        """Return the text of a row; None if there is no such row."""
        row = self._row(section, name)
        return None if row is None else row.text

    def data(self, section: str, name: str) -> Mapping[str, object]:
        """Return the data of a row; empty if there is no such row, or it is only a text."""
        row = self._row(section, name)
        return row.data if row is not None and isinstance(row.data, Mapping) else {}

    def _row(self, section: str, name: str) -> Row | None:
        return next((row for row in self.rows if (row.section, row.name) == (section, name)), None)

    def to_json(self) -> str:
        """Return the account as JSON, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read an account that :meth:`to_json` wrote, perhaps in another version of megapg."""
        values = json.loads(text)
        values["rows"] = tuple(Row(**_known(Row, row)) for row in values["rows"])
        values["findings"] = tuple(
            Finding(**{**_known(Finding, finding), "level": Level(finding["level"])})
            for finding in values["findings"]
        )
        return cls(**_known(cls, values))


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
