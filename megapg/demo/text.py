"""Text to train on: the standard library's own sources, or the user's files."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapg.errors import MegapgError

DEFAULT_BYTES = 1 << 20  # a mebibyte of the standard library is enough for a demo
MOST_BYTES = 64 << 20


class NoTextError(MegapgError, ValueError):
    """The paths given hold no text to train on."""


def read_text(paths: Sequence[Path], at_least: int) -> bytes:
    """Return the bytes of ``paths``, files or directories; of the standard library if there are
    none.

    Args:
        paths: read in order, directories in name order; 64 MiB at most are read.
        at_least: bytes needed.

    Raises:
        NoTextError: a path can't be read, or all of them together are too short.
    """
    limit = MOST_BYTES if paths else DEFAULT_BYTES
    chosen = list(paths) or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = bytearray()
    try:
        for file in _files(chosen):
            text += file.read_bytes()[: limit - len(text)]
            if len(text) >= limit:
                break
    except OSError as error:
        raise NoTextError(f"--data: {error}") from error
    if len(text) < at_least:
        places = ", ".join(map(str, chosen[:3]))
        raise NoTextError(f"{places}: {len(text)} bytes of text, but {at_least} are needed.")
    return bytes(text)


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(inside for inside in path.rglob("*") if inside.is_file())
        else:
            yield path
