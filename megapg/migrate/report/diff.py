"""The edits as a unified diff that ``git apply`` and ``patch -p1`` turn into the same bytes.

Hunks come from the edits and are not searched for, so a file of any length takes as long as reading
it. Lines end at ``\\n`` and nowhere else, as for git: a ``\\r`` is a character like others.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.migration import Rewritten

_CONTEXT = 3
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


@dataclass
class _Change:
    """Old lines that other lines take the place of, as half-open ranges from 0."""

    start: int
    stop: int
    new_start: int
    new_stop: int


def unified(file: Rewritten, base: Path) -> list[bytes]:
    """The diff of one file: two lines with its name, then hunks. No lines where nothing changes.

    Args:
        file: what becomes of it.
        base: the directory where the diff is to be applied.
    """
    old, new = (io.BytesIO(data).readlines() for data in (file.before, file.after))
    hunks = [line for hunk in _hunks(_changes(file, old, new)) for line in _hunk(hunk, old, new)]
    name = Path(os.path.relpath(file.path, base)).as_posix()
    was = b"/dev/null\n" if file.is_new else _named("a/" + name)
    return [b"--- " + was, b"+++ " + _named("b/" + name), *hunks] if hunks else []


def base_of(files: Sequence[Rewritten], root: Path) -> Path:
    """Where a diff of them is to be applied: here if they are all below, else the project's root.

    Args:
        files: what the diff is of.
        root: of the project.
    """
    folders = [file.path.parent for file in files]
    for base in (Path.cwd(), root):
        if all(folder.is_relative_to(base) for folder in folders):
            return base
    return Path(os.path.commonpath(folders))


def _changes(file: Rewritten, old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[_Change]:
    changes: list[_Change] = []
    at = line = shift = 0
    for edit in file.edits:
        first = line + file.text.count("\n", at, edit.start)
        last = first + file.text.count("\n", edit.start, edit.stop)
        if not changes or first >= changes[-1].stop:
            changes.append(_Change(first, last + 1, first + shift, 0))
        shift += edit.new.count("\n") - (last - first)
        changes[-1].stop, changes[-1].new_stop = last + 1, last + 1 + shift
        at, line = edit.stop, last
    for change in changes:
        _trim(change, old, new)
        if change.start < change.stop or change.new_start < change.new_stop:
            yield change


def _trim(change: _Change, old: Sequence[bytes], new: Sequence[bytes]) -> None:
    """Leave out what is the same at both ends: a statement put in leaves the line that it is at."""
    change.stop, change.new_stop = min(change.stop, len(old)), min(change.new_stop, len(new))
    while _both(change) and old[change.start] == new[change.new_start]:
        change.start += 1
        change.new_start += 1
    while _both(change) and old[change.stop - 1] == new[change.new_stop - 1]:
        change.stop -= 1
        change.new_stop -= 1


def _both(change: _Change) -> bool:
    return change.start < change.stop and change.new_start < change.new_stop


def _hunks(changes: Iterator[_Change]) -> Iterator[list[_Change]]:
    """Changes whose surroundings would overlap belong together."""
    hunk: list[_Change] = []
    for change in changes:
        if hunk and change.start - hunk[-1].stop > 2 * _CONTEXT:
            yield hunk
            hunk = []
        hunk.append(change)
    if hunk:
        yield hunk


def _hunk(hunk: Sequence[_Change], old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[bytes]:
    first, last = hunk[0], hunk[-1]
    before = min(_CONTEXT, first.start)
    after = min(_CONTEXT, len(old) - last.stop)
    at, new_at = first.start - before, first.new_start - before
    removed, added = last.stop + after - at, last.new_stop + after - new_at
    begin = at + 1 if removed else at  # of no lines the one before is named
    yield f"@@ -{begin},{removed} +{new_at + 1},{added} @@\n".encode()
    for change in hunk:
        yield from _marked(b" ", old[at : change.start])
        yield from _marked(b"-", old[change.start : change.stop])
        yield from _marked(b"+", new[change.new_start : change.new_stop])
        at = change.stop
    yield from _marked(b" ", old[at : at + after])


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line
        if not line.endswith(b"\n"):
            yield b"\n\\ No newline at end of file\n"


def _named(name: str) -> bytes:
    """A file's name as git writes it: quoted where a character would end it."""
    if any(character in _ESCAPES for character in name):
        name = '"' + "".join(_ESCAPES.get(character, character) for character in name) + '"'
    elif " " in name:
        name += "\t"
    return os.fsencode(name) + b"\n"
