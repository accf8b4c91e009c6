"""A unified diff that ``git apply`` and ``patch -p1`` accept."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Sequence
from pathlib import Path

from megapg.migrate.migration import Rewritten

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def unified(file: Rewritten, base: Path) -> list[bytes]:
    """Return the diff of one file: two lines with its name, then hunks. Empty without a change.

    Args:
        file: the file.
        base: the folder where the diff will be applied.
    """
    # As in git, a line ends at \n only.
    old, new = (io.BytesIO(data).readlines() for data in (file.before, file.after))
    lines = [*difflib.diff_bytes(difflib.unified_diff, old, new)][2:]
    if not lines:
        return []
    name = Path(os.path.relpath(file.path, base)).as_posix()
    source = b"/dev/null\n" if file.is_new else _named(f"a/{name}")
    return [b"--- " + source, b"+++ " + _named(f"b/{name}"), *map(_ended, lines)]


def base_of(files: Sequence[Rewritten], root: Path) -> Path:
    """Return the folder for the names in a diff: the current one if all files are below it.

    Args:
        files: the files of the diff.
        root: of the project, the second choice.
    """
    folders = [file.path.parent for file in files]
    for base in (Path.cwd(), root):
        if all(folder.is_relative_to(base) for folder in folders):
            return base
    return Path(os.path.commonpath(folders))


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"


def _named(name: str) -> bytes:
    """A file name as git writes it: in quotes if it has special characters."""
    if any(character in _ESCAPES for character in name):
        name = '"' + "".join(_ESCAPES.get(character, character) for character in name) + '"'
    elif " " in name:
        name += "\t"
    return os.fsencode(name) + b"\n"
