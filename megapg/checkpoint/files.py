"""The small files of a checkpoint: reading them without trusting them, and syncing their directory.

A bad file raises :class:`~megapg.errors.BrokenCheckpointError` at once, in bounded memory.
Examples: a pipe, a link to a device, a sparse file of a hundred gigabytes, JSON nested a million
times.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import BinaryIO

from megapg.errors import BrokenCheckpointError

# Bytes. Far more than the files need, and far less than the memory of a machine.
LARGEST_JSON = 256 * 2**20
LARGEST_PICKLE = 4 * 2**30

# Errors of file systems that can't sync a directory: they do it themselves, or never.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file to read. Anything else could block or never end.

    Raises:
        BrokenCheckpointError: it is missing, can't be read, or is no regular file.
    """
    try:
        # Non-blocking, because opening a pipe waits for a writer.
        stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError as error:
        raise broken(file, "is missing") from error
    except IsADirectoryError as error:
        raise broken(file, "is no regular file") from error
    except OSError as error:
        raise broken(file, f"can't be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise broken(file, "is no regular file")
    return stream


def read_small(file: Path, limit: int, had: int | None = None) -> bytes:
    """Return the contents of a file of at most ``limit`` bytes; ``had`` is its known size, if any.

    Raises:
        BrokenCheckpointError: it is missing, can't be read, is no regular file, is larger, or has
            another size than ``had``.
    """
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if had not in (None, size):
            short = ": truncated" if size < had else ""
            raise broken(file, f"has {size} bytes and had {had}{short}")
        if size > limit:
            raise broken(file, "is far too large")
        try:
            return stream.read(size)
        except OSError as error:
            raise broken(file, f"can't be read ({error.strerror})") from error


def read_json(file: Path, limit: int = LARGEST_JSON) -> object:
    """Return the value in a JSON file; raises as :func:`read_small`, and for invalid JSON."""
    return parse_json(file, read_small(file, limit))


def parse_json(file: Path, data: bytes) -> object:
    """As :func:`read_json`, for data that was read already."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise broken(file, "is no JSON") from error


def sync_directory(directory: Path) -> None:
    """Sync the names in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(handle)


def broken(file: Path, problem: str) -> BrokenCheckpointError:
    """Return the error for one file; ``problem`` is the rest of the sentence after its name."""
    return BrokenCheckpointError(
        f"{file} {problem}. Take it from a copy, or use an older checkpoint.",
        [f"{file.name}: {problem}"],
    )
