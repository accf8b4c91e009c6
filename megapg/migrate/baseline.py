"""The ratchet: uses in the baseline may stay, and no use may be added.

A baseline counts uses by file, function and getter. Line numbers do not matter, so code may move.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.uses import Use

_FORMAT = 1
_HINT = "Write one with --update-baseline."


def key_of(use: Use) -> str:
    """Return the key under which a baseline counts a use."""
    return f"{use.file}::{use.function}::{use.name or use.kind}"


def beyond(uses: Iterable[Use], allowed: Mapping[str, int]) -> list[Use]:
    """Return the uses that a baseline does not allow: for each key the last ones of the file."""
    uses = tuple(uses)
    too_many = Counter(map(key_of, uses))
    too_many.subtract({key: count for key, count in allowed.items() if key in too_many})
    new = []
    for use in reversed(uses):
        if too_many[key_of(use)] > 0:
            too_many[key_of(use)] -= 1
            new.append(use)
    return new[::-1]


def gone(uses: Iterable[Use], allowed: Mapping[str, int]) -> int:
    """Return how many of the allowed uses no longer exist."""
    there = Counter(map(key_of, uses))
    return sum(max(0, count - there[key]) for key, count in allowed.items())


def of_files(allowed: Mapping[str, int], is_read: Callable[[str], bool]) -> dict[str, int]:
    """Return the allowed counts of some files.

    Args:
        allowed: the counts of all files.
        is_read: True for the name of a file whose uses are known.
    """
    return {key: count for key, count in allowed.items() if is_read(key.partition("::")[0])}


def read_baseline(file: Path) -> dict[str, int]:
    """Return the allowed counts.

    Raises:
        UnsupportedOptionError: if the file can't be read or is no baseline.
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


def write_baseline(file: Path, uses: Iterable[Use], is_read: Callable[[str], bool]) -> None:
    """Write a baseline that allows these uses. The counts of files that were not read stay.

    Args:
        file: the baseline.
        uses: those in the files that were read.
        is_read: True for the name of such a file.

    Raises:
        UnsupportedOptionError: if the file can't be written.
    """
    try:
        before = read_baseline(file)
    except UnsupportedOptionError:
        before = {}
    others = of_files(before, lambda name: not is_read(name))
    allowed = {**others, **Counter(map(key_of, uses))}
    content = {"format": _FORMAT, "allowed": dict(sorted(allowed.items()))}
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UnsupportedOptionError(f"{file} can't be written: {error.strerror}.") from error
