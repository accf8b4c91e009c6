"""``integrity.json``: size and checksums of every file of a checkpoint when it was saved.

Megatron-core 0.19 writes and checks this file too
(``megatron/core/dist_checkpointing/validation.py``): a SHA-256 for each file. megapg adds values
that Megatron-core ignores: the sizes, a note about the save, a checksum of the manifest itself, and
a seal of each entry of each shard. With the seals, a rank can check the entries that it reads
without reading the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megapg.checkpoint.files import broken, open_regular, read_json, read_small, sync_directory

MANIFEST_FILE = "integrity.json"

_ALGORITHM = "sha256"
_PIECE = 2**20  # bytes to read at a time
_HEX = 8  # digits of a CRC-32


@dataclass(frozen=True)
class FileSum:
    """Size and checksums of a file.

    Attributes:
        size: bytes.
        sha256: of the contents, 64 hex digits.
        seals: for a shard, the seal of each entry (:func:`megapg.checkpoint.archive.sealed`), in
            the order of the entries in the file.
    """

    size: int
    sha256: str
    seals: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        path: the directory of the checkpoint.
        sha256: name of each file -> SHA-256 of its contents.
        sizes: name -> bytes; empty in a manifest of Megatron-core.
        seals: name of a shard -> see :class:`FileSum`; empty in a manifest of Megatron-core.
        about: megapg's notes about the save; empty in a manifest of Megatron-core.
    """

    path: Path
    sha256: Mapping[str, str]
    sizes: Mapping[str, int]
    seals: Mapping[str, tuple[int, ...]]
    about: Mapping[str, object]

    def read(self, name: str, limit: int) -> bytes:
        """Return the contents of a small file after comparing them with the manifest.

        A file of another size is not read.

        Raises:
            BrokenCheckpointError: it has changed or is not listed; also as
                :func:`~megapg.checkpoint.files.read_small`.
        """
        file = self.path / name
        if name not in self.sha256:
            raise broken(file, "is not of this checkpoint: the manifest does not list it")
        data = read_small(file, limit, self.sizes.get(name))
        if hashlib.sha256(data).hexdigest() != self.sha256[name]:
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
    if content.get("algorithm", _ALGORITHM) != _ALGORITHM:
        raise ValueError(f"its algorithm is {content['algorithm']!r:.40}, not {_ALGORITHM!r}")
    ours = "megapg" in content or "checksum" in content
    if ours and content.get("checksum") != _checksum(content):
        raise ValueError("its own checksum is another")
    sums, sizes = content.get("files"), content.get("sizes", {})
    seals, about = content.get("seals", {}), content.get("megapg", {})
    if not isinstance(sums, dict):
        raise ValueError("it lists no files")
    if not all(isinstance(part, dict) for part in (sizes, seals, about)):
        raise ValueError("a part of it is no object")
    for name, sha256 in sums.items():
        size = sizes.get(name)
        if not isinstance(sha256, str) or not (size is None or type(size) is int):
            raise ValueError(f"what it says of {name!r} is no checksum and size")
        if not name.isprintable() or name in ("", ".", "..", MANIFEST_FILE) or "/" in name:
            raise ValueError(f"{name!r} is no file of a checkpoint")
    if not sums.keys() >= sizes.keys() | seals.keys():
        raise ValueError("it has sizes or seals of files that it does not list")
    numbers = {name: _numbers(name, text) for name, text in seals.items()}
    return Manifest(directory, sums, sizes, numbers, about)


def _numbers(name: str, text: object) -> tuple[int, ...]:
    if not isinstance(text, str) or len(text) % _HEX:
        raise ValueError(f"what it says of the entries of {name!r} is no seals")
    data = bytes.fromhex(text)
    width = _HEX // 2
    return tuple(int.from_bytes(data[at : at + width], "big") for at in range(0, len(data), width))


def sum_of(path: Path, on_progress: Callable[[int], None] = lambda done: None) -> FileSum:
    """Return size and checksum of a file. ``on_progress`` gets the size of each piece read.

    Raises:
        BrokenCheckpointError: it is missing or can't be read.
    """
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_PIECE))
    with open_regular(path) as stream:
        while True:
            try:
                count = stream.readinto(buffer)  # type: ignore[attr-defined]
            except OSError as error:
                raise broken(path, f"can't be read ({error.strerror})") from error
            if not count:
                return FileSum(size, digest.hexdigest())
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
    """
    content: dict[str, object] = {
        "algorithm": _ALGORITHM,
        "files": {name: files[name].sha256 for name in sorted(files)},
        "sizes": {name: files[name].size for name in sorted(files)},
        "seals": {
            name: "".join(f"{number:0{_HEX}x}" for number in files[name].seals)
            for name in sorted(files)
            if files[name].seals
        },
        "megapg": dict(about),
    }
    content["checksum"] = _checksum(content)
    final, unfinished = directory / MANIFEST_FILE, directory / f"{MANIFEST_FILE}.partial"
    write_file(unfinished, json.dumps(content, indent=2).encode())
    unfinished.replace(final)
    sync_directory(directory)


def _checksum(content: Mapping[str, object]) -> str:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
