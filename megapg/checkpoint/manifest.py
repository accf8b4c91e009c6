"""``integrity.json``: size and checksums of every file of a checkpoint when it was saved.

Megatron-core 0.19 writes and checks this file too
(``megatron/core/dist_checkpointing/validation.py``): ``files`` has the SHA-256 of each file. megapg
lists its small files there. Its shards are in ``shards``, with XXH3-128, which takes a twentieth of
the time. ``shards`` also has an XXH3-64 for each entry. With these, a rank can check the entries
that it reads without reading the others. megapg also adds the sizes, a note about the save, and a
checksum of the manifest itself. Megatron-core ignores all that megapg adds.

megapg 0.2 listed shards in ``files``, too. Its other checksums of the entries, ``seals``, are
ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from xxhash import xxh3_128

from megapg.checkpoint.files import (
    LARGEST_JSON,
    broken,
    open_regular,
    read_json,
    read_small,
    sync_directory,
)
from megapg.errors import CheckpointError

MANIFEST_FILE = "integrity.json"
SAVED_AT = "saved_at"  # among the notes: seconds since 1970
PARTIAL = "partial"  # among the notes: keys of tensors that some layers do not have

Algorithm: TypeAlias = Literal["sha256", "xxh3_128"]


def partial_of(about: Mapping[str, object]) -> frozenset[str]:
    """Return the keys of tensors that some layers do not have, from the notes about a save."""
    noted = about.get(PARTIAL, [])
    return frozenset(map(str, noted)) if isinstance(noted, list) else frozenset()


_HASHES: Mapping[Algorithm, Callable[..., Any]] = {"sha256": hashlib.sha256, "xxh3_128": xxh3_128}
_ENTRY_DIGITS = 16  # of an XXH3-64
_PIECE = 2**20  # bytes to read at a time


@dataclass(frozen=True)
class FileSum:
    """Size and checksums of a file.

    Attributes:
        size: bytes; None if unknown, in a manifest of Megatron-core.
        digest: the checksum of the contents, in hex digits.
        algorithm: of the digest.
        entries: for a shard, the XXH3-64 of each entry, in the order of the entries in the file.
            Empty in manifests of megapg 0.2 and of Megatron-core.
    """

    size: int | None
    digest: str
    algorithm: Algorithm = "sha256"
    entries: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        path: the directory of the checkpoint.
        files: name of each file -> its size and checksums.
        about: megapg's notes about the save; empty in a manifest of Megatron-core.
    """

    path: Path
    files: Mapping[str, FileSum]
    about: Mapping[str, object]

    def read(self, name: str, limit: int) -> bytes:
        """Return the contents of a small file after comparing them with the manifest.

        A file of another size is not read.

        Raises:
            BrokenCheckpointError: it has changed or is not listed; also as
                :func:`~megapg.checkpoint.files.read_small`.
        """
        file, known = self.path / name, self.files.get(name)
        if known is None:
            raise broken(file, "is not of this checkpoint: the manifest does not list it")
        data = read_small(file, limit, known.size)
        if _HASHES[known.algorithm](data).hexdigest() != known.digest:
            raise broken(file, "has changed: its checksum is another")
        return data


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a checkpoint; None if it has none.

    Raises:
        BrokenCheckpointError: it is damaged, was edited, or makes no sense.
    """
    file = directory / MANIFEST_FILE
    if not os.path.lexists(file):
        return None
    content = read_json(file)
    try:
        return _manifest(directory, content)
    except ValueError as error:
        raise broken(file, f"is damaged or was edited ({error})") from error


def _manifest(directory: Path, content: object) -> Manifest:
    """Parse a manifest. ValueError names the part that makes no sense."""
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    if content.get("algorithm", "sha256") != "sha256":
        raise ValueError(f"its algorithm is {content['algorithm']!r:.40}, not 'sha256'")
    ours = "megapg" in content or "checksum" in content
    if ours and content.get("checksum") != _checksum(content):
        raise ValueError("its own checksum is another")
    sums, sizes = content.get("files"), content.get("sizes", {})
    shards, about = content.get("shards", {}), content.get("megapg", {})
    if not isinstance(sums, dict):
        raise ValueError("it lists no files")
    if not all(isinstance(part, dict) for part in (sizes, shards, about)):
        raise ValueError("a part of it is no object")
    if not sums.keys() >= sizes.keys():
        raise ValueError("it has sizes of files that it does not list")
    files = {name: FileSum(sizes.get(name), sha256) for name, sha256 in sums.items()}
    files |= {name: _shard_sum(name, shard) for name, shard in shards.items()}
    for name, found in files.items():
        if not isinstance(found.digest, str) or not (found.size is None or type(found.size) is int):
            raise ValueError(f"what it says of {name!r} is no checksum and size")
        if not name.isprintable() or name in ("", ".", "..", MANIFEST_FILE) or "/" in name:
            raise ValueError(f"{name!r} is no file of a checkpoint")
    return Manifest(directory, files, about)


def _shard_sum(name: str, shard: object) -> FileSum:
    found = shard if isinstance(shard, dict) else {}
    text = found.get("xxh3_64")
    if not isinstance(text, str) or len(text) % _ENTRY_DIGITS:
        raise ValueError(f"what it says of the entries of {name!r} is no checksums")
    starts = range(0, len(text), _ENTRY_DIGITS)
    entries = tuple(text[start : start + _ENTRY_DIGITS] for start in starts)
    return FileSum(found.get("size"), found.get("xxh3_128"), "xxh3_128", entries)  # type: ignore[arg-type]  # the caller checks both


def sum_of(
    path: Path,
    algorithm: Algorithm = "sha256",
    on_progress: Callable[[int], None] = lambda done: None,
) -> FileSum:
    """Return size and checksum of a file. ``on_progress`` gets the size of each piece read.

    Raises:
        BrokenCheckpointError: it is missing or can't be read.
    """
    digest, size = _HASHES[algorithm](), 0
    buffer = memoryview(bytearray(_PIECE))
    with open_regular(path) as stream:
        while True:
            try:
                count = stream.readinto(buffer)  # type: ignore[attr-defined]
            except OSError as error:
                raise broken(path, f"can't be read ({error.strerror})") from error
            if not count:
                return FileSum(size, digest.hexdigest(), algorithm)
            digest.update(buffer[:count])
            size += count
            on_progress(count)


def write_file(path: Path, data: bytes) -> FileSum:
    """Write a small new file, and sync it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(len(data), hashlib.sha256(data).hexdigest())


def write_manifest(
    directory: Path, files: Mapping[str, FileSum], about: Mapping[str, object]
) -> None:
    """Write ``integrity.json`` and sync it. It is never visible in part.

    ``files`` are all files of the directory, and no more are written after this. ``about`` holds
    plain values to note about the save.

    Raises:
        CheckpointError: it would be too large to be read.
    """
    small = {name: files[name] for name in sorted(files) if files[name].algorithm == "sha256"}
    content: dict[str, object] = {
        "algorithm": "sha256",
        "files": {name: known.digest for name, known in small.items()},
        "sizes": {name: known.size for name, known in small.items()},
        "shards": {
            name: {
                "size": files[name].size,
                "xxh3_128": files[name].digest,
                "xxh3_64": "".join(files[name].entries),  # of each entry
            }
            for name in sorted(files.keys() - small.keys())
        },
        "megapg": {**about, SAVED_AT: time.time()},
    }
    content["checksum"] = _checksum(content)
    final, unfinished = directory / MANIFEST_FILE, directory / f"{MANIFEST_FILE}.partial"
    data = json.dumps(content, indent=2).encode()
    if len(data) > LARGEST_JSON:
        raise CheckpointError(
            f"{final} would have {len(data)} bytes, and at most {LARGEST_JSON} are read: the "
            "checkpoint has too many shards. Save from fewer ranks."
        )
    write_file(unfinished, data)
    unfinished.replace(final)
    sync_directory(directory)


def _checksum(content: Mapping[str, object]) -> str:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
