"""Reading the small files of a checkpoint, whatever lies in their place.

A pipe, a link to a device, a file of a hundred gigabytes that are not there, JSON that is nested a
million times: each is a :class:`~megapg.errors.BrokenCheckpointError` at once, in bounded memory.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import Counter
from pathlib import Path
from typing import BinaryIO, Never

from megapg.errors import BrokenCheckpointError

# Far more than they need, and far less than a machine has. Bytes.
LARGEST_JSON = 64 * 2**20
LARGEST_PICKLE = 4 * 2**30

# Where a directory can't be synced, the file system does so by itself, or never.
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def open_regular(file: Path) -> BinaryIO:
    """Open a file to read; what is no regular file would block or never end.

    BrokenCheckpointError: it is missing, can't be read, or is no regular file.
    """
    try:
        # Non-blocking, as opening a pipe waits for a writer.
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
    """All of a file that has at most ``limit`` bytes, and had ``had``, where that is known.

    BrokenCheckpointError: it is missing, can't be read, is no regular file, is larger, or has
    another size than it had.
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
    """What a JSON file holds; raises as :func:`read_small`, and for what is no JSON.

    Numbers are finite, and no object names a key twice: readers differ in which they take.
    """
    return parse_json(file, read_small(file, limit))


def parse_json(file: Path, data: bytes) -> object:
    """As :func:`read_json`, of what was read already."""
    try:
        return json.loads(
            data, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object
        )
    except _OddJSONError as error:
        raise broken(file, f"is damaged ({error})") from error
    except (ValueError, RecursionError) as error:
        raise broken(file, "is no JSON") from error


class _OddJSONError(ValueError):
    pass


def _refuse(constant: str) -> Never:
    raise _OddJSONError(f"it has the number {constant}")


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse(text)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise _OddJSONError(f"it has {name[:40]!r} twice")
    return found


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(handle)


def broken(file: Path, problem: str) -> BrokenCheckpointError:
    """The error for one file; ``problem`` goes on after its name."""
    return BrokenCheckpointError(
        f"{file} {problem}. Take it from a copy, or use an older checkpoint.",
        [f"{file.name}: {problem}"],
    )
