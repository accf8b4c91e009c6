"""What one rank tells about itself: rows of facts, and findings. It travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Self


class Level(StrEnum):
    """How bad a finding is. A note makes nothing look wrong."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """Something that looks wrong, and what to do about it."""

    check: str  # which check found it, for programs
    level: Level  # how bad it is
    what: str  # what is wrong and what comes of it
    remedy: str  # what to do


@dataclass(frozen=True)
class Row:
    """One fact."""

    section: str  # what it belongs to: ``"software"``
    name: str  # what it is about: ``"torch"``
    text: str  # the fact as people read it
    # the fact as programs read it, where that is more than the text
    data: Mapping[str, object] | bool | int | None = None
    alike: bool = False  # whether it has to be the same on every rank


@dataclass(frozen=True)
class Account:
    """Everything that one rank tells."""

    rank: int  # its global rank
    host: str  # where it runs
    device: str  # the accelerator it would use, by a name that no other has; empty without one
    rows: tuple[Row, ...]  # the facts
    findings: tuple[Finding, ...]  # what looks wrong there

    def get(self, section: str, name: str) -> str | None:
        """The text of a row; None where there is no such row."""
        row = self._row(section, name)
        return None if row is None else row.text

    def data(self, section: str, name: str) -> Mapping[str, object]:
        """What a row is made of; empty where there is no such row, or it is only a text."""
        row = self._row(section, name)
        return row.data if row is not None and isinstance(row.data, Mapping) else {}

    def _row(self, section: str, name: str) -> Row | None:
        return next((row for row in self.rows if (row.section, row.name) == (section, name)), None)

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The account that :meth:`to_json` wrote, perhaps that of another version of megapg."""
        told = json.loads(text)
        told["rows"] = tuple(Row(**_known(Row, row)) for row in told["rows"])
        told["findings"] = tuple(
            Finding(**{**_known(Finding, finding), "level": Level(finding["level"])})
            for finding in told["findings"]
        )
        return cls(**_known(cls, told))


def _known(kind: type, told: Mapping[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in told.items() if name in names}
