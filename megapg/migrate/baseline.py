"""The ratchet: what was left when the baseline was written may stay, nothing may be added.

A baseline counts uses by file, function and getter, not by line, so that code may move.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.find.sites import Site

_FORMAT = 1
_HINT = "Write one with --update-baseline."


def key_of(site: Site) -> str:
    """What a use counts as: its file, the function around it, and what it reads."""
    return f"{site.file}::{site.function or site.class_name}::{site.name or site.kind}"


def beyond(sites: Iterable[Site], allowed: Mapping[str, int]) -> tuple[Site, ...]:
    """The uses that are more than a baseline allows: of a key the last ones in the file."""
    sites = tuple(sites)
    too_many = Counter(map(key_of, sites))
    too_many.subtract({key: count for key, count in allowed.items() if key in too_many})
    new = []
    for site in reversed(sites):
        if too_many[key_of(site)] > 0:
            too_many[key_of(site)] -= 1
            new.append(site)
    return tuple(reversed(new))


def gone(sites: Iterable[Site], allowed: Mapping[str, int]) -> int:
    """How many of the allowed uses are not there any more."""
    there = Counter(map(key_of, sites))
    return sum(max(0, count - there[key]) for key, count in allowed.items())


def read_baseline(file: Path) -> dict[str, int]:
    """The counts that a baseline allows.

    Raises:
        UnsupportedOptionError: there is none, or it is no baseline of a format that is known.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UnsupportedOptionError(f"there is no baseline {file}. {_HINT}") from error
    except (OSError, ValueError) as error:
        raise UnsupportedOptionError(f"{file} can't be read: {error}. {_HINT}") from error
    allowed = content.get("allowed") if isinstance(content, dict) else None
    if not isinstance(allowed, dict) or content.get("format") != _FORMAT:
        raise UnsupportedOptionError(f"{file} is no baseline of format {_FORMAT}. {_HINT}")
    if not all(isinstance(count, int) and count > 0 for count in allowed.values()):
        raise UnsupportedOptionError(f"{file}: counts are whole numbers from 1. {_HINT}")
    return allowed


def write_baseline(file: Path, sites: Iterable[Site]) -> None:
    """Allow what is there now. The file is replaced as a whole or not at all.

    Raises:
        UnsupportedOptionError: it can't be written.
    """
    content = {"format": _FORMAT, "allowed": dict(sorted(Counter(map(key_of, sites)).items()))}
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UnsupportedOptionError(f"{file} can't be written: {error.strerror}.") from error
