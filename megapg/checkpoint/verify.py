"""Checks that every file of a checkpoint is still as it was saved: :func:`verify`.

The files are compared with the manifest. Without a manifest, they are checked against each other:
``.metadata`` has the place of each shard, and each shard is an archive with checksums inside.
"""

from __future__ import annotations

import io
import math
import os
import stat
import threading
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from typing_extensions import override

from megapg.checkpoint.contents import (
    COMMON_KEY,
    NAME_ONE,
    Contents,
    read_common,
    read_metadata,
    wrong_format,
    wrong_name,
)
from megapg.checkpoint.directory import COMMON_FILE, FORMAT_FILE, INDEX_FILE
from megapg.checkpoint.entries import flaw, inside
from megapg.checkpoint.files import open_regular, read_json
from megapg.checkpoint.manifest import MANIFEST_FILE, Manifest, read_manifest, sum_of
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from megapg.torch_private import StorageInfo, transforms_of

T = TypeVar("T")

_PIECE = 2**20  # bytes to read at a time
_ZIP_END = 22  # bytes of the record that ends an archive without a comment
_SUFFIX = ".distcp"


@dataclass(frozen=True)
class Report:
    """The result of :func:`verify`.

    Attributes:
        path: the directory of the checkpoint.
        problems: one line per damaged file, beginning with its name.
        manifest: whether there was a manifest to compare with. Two changes are not detected without
            one: a file replaced as a whole by another of the same form, and changed bits in the
            padding between the parts of a file.
        files: how many files were checked.
        size: their bytes.
    """

    path: Path
    problems: tuple[str, ...]
    manifest: bool
    files: int
    size: int

    @property
    def good(self) -> bool:
        """True if no problem was found."""
        return not self.problems


def verify(
    directory: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> Report:
    """Check every file of one checkpoint: missing, truncated, changed, swapped, or foreign.

    It needs no GPU, no process group and no Megatron-core, and runs no code from a file. It reads
    every byte once, several files at a time.

    Args:
        directory: of one checkpoint, for example ``checkpoints/iter_0000123``.
        on_progress: called with the number of bytes read so far, and the total.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint in it.
    """
    path = Path(directory)
    files = _files(path)
    if not files:
        raise CheckpointNotFoundError(f"{path} has no files. {NAME_ONE}")
    return _Check(path, files, on_progress).run()


def _files(path: Path) -> dict[str, int]:
    """Return name -> size of every file in the directory except the manifest."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        raise CheckpointNotFoundError(
            f"{path} can't be read ({error.strerror}). {NAME_ONE}"
        ) from error
    found = {}
    for entry in entries:
        with suppress(OSError):  # a dangling link counts as missing
            status = entry.stat()
            if entry.name != MANIFEST_FILE and not stat.S_ISDIR(status.st_mode):
                found[entry.name] = status.st_size
    return found


class _Check:
    """One run of :func:`verify`."""

    def __init__(
        self, path: Path, files: dict[str, int], on_progress: Callable[[int, int], None] | None
    ) -> None:
        self._path, self._files = path, files
        self._on_progress = on_progress or (lambda done, total: None)
        self._lock = threading.Lock()
        self._done, self._total = 0, sum(files.values())
        self._problems: dict[str, str] = {}  # file -> the rest of its line

    def run(self) -> Report:
        # None if there is no manifest.
        expected = self._read(MANIFEST_FILE, lambda: read_manifest(self._path))
        if expected is not None:
            self._compare(expected)
        changed = INDEX_FILE in self._problems
        metadata = None if changed else self._read(INDEX_FILE, lambda: read_metadata(self._path))
        of_megatron = metadata is not None and COMMON_KEY in metadata.state_dict_metadata
        alone = expected is None  # the files are checked against each other
        self._check_config(needed=of_megatron or COMMON_FILE in self._files)
        if metadata is not None:
            if not self._problems.keys() & {COMMON_FILE, FORMAT_FILE}:
                place = (metadata.storage_data or {}).get(MetadataIndex(COMMON_KEY))
                home = COMMON_FILE
                if place is not None and COMMON_FILE not in self._files:
                    home = str(place.relative_path)
                common = self._read(home, lambda: read_common(self._path, metadata, check=alone))
                if common is not None and (problem := wrong_name(self._path, common)):
                    self._add(home, problem)
            self._check_places(metadata, archives=alone)
        self._on_progress(self._total, self._total)
        return Report(
            path=self._path,
            problems=tuple(f"{name}: {self._problems[name]}" for name in sorted(self._problems)),
            manifest=expected is not None,
            files=len(self._files),
            size=self._total,
        )

    def _add(self, name: str, problem: str) -> None:
        # The first problem of a file usually explains the others.
        with self._lock:
            self._problems.setdefault(name, problem)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            self._on_progress(self._done, self._total)

    def _read(self, name: str, read: Callable[[], T]) -> T | None:
        """Run a reader. Its error becomes a problem of the file that it names, or of ``name``."""
        try:
            return read()
        except CheckpointNotFoundError:
            raise
        except BrokenCheckpointError as error:
            self._add(*error.problems[0].split(": ", 1))
        except UnsafeCheckpointError as error:
            self._add(name, f"is not safe to load: {error}")
        except (CheckpointError, OSError) as error:
            self._add(name, f"can't be read ({error})")
        return None

    def _compare(self, expected: Manifest) -> None:
        sums, sizes = expected.sha256, expected.sizes
        for name in self._files.keys() - sums.keys():
            if name.endswith(_SUFFIX) or name in (COMMON_FILE, FORMAT_FILE, INDEX_FILE):
                self._add(name, "is not of this checkpoint: the manifest does not list it")
        for name in sums.keys() - self._files.keys():
            self._add(name, "is missing")
        # A file of the wrong size is read only if it might be another file of the checkpoint.
        wrong_size = {
            name: f"has {self._files[name]} bytes and had {size}"
            + (": truncated" if self._files[name] < size else "")
            for name, size in sizes.items()
            if self._files.get(name, size) != size
        }
        read = [
            name
            for name in sums.keys() & self._files.keys()
            if name not in wrong_size or self._files[name] in sizes.values()
        ]

        def sha256(name: str) -> str | None:
            found = self._read(name, lambda: sum_of(self._path / name, self._advance))
            return None if found is None else found.sha256

        with ThreadPoolExecutor() as pool:
            actual = dict(zip(read, pool.map(sha256, read), strict=True))
        owners = {sha256: name for name, sha256 in sums.items() if sizes.get(name) != 0}
        for name in sums.keys() & self._files.keys():
            if actual.get(name) == sums[name]:
                continue
            owner = owners.get(actual.get(name) or "")
            if owner is not None and actual.get(owner) == sums[name]:
                self._add(name, f"was swapped with {owner}")
            elif owner is not None:
                self._add(name, f"holds the contents of {owner}")
            else:
                self._add(name, wrong_size.get(name, "has changed: its checksum is another"))

    def _check_config(self, *, needed: bool) -> None:
        """Check ``metadata.json``, by which Megatron knows the format; torch alone writes none."""
        if FORMAT_FILE not in self._files:
            if needed:
                self._add(FORMAT_FILE, "is missing")
            return
        config = self._read(FORMAT_FILE, lambda: read_json(self._path / FORMAT_FILE))
        if FORMAT_FILE not in self._problems and (problem := wrong_format(config)):
            self._add(FORMAT_FILE, problem)

    def _check_places(self, metadata: Metadata, *, archives: bool) -> None:
        """Compare the places in ``.metadata`` with the shard files. Check archives on request."""
        shards: dict[str, list[_Shard]] = defaultdict(list)
        for shard in self._shards(metadata):
            shards[shard.place.relative_path].append(shard)
        for name in self._files.keys() - shards.keys():
            if name.endswith(_SUFFIX):
                self._add(name, "is not of this checkpoint: .metadata does not refer to it")
        contents = Contents(self._path, metadata, {})

        def check(name: str) -> None:
            try:
                self._check_ranges(name, shards[name], complete=archives)
                if archives and name not in self._problems:
                    self._check_archives(name, shards[name], contents)
            except Exception as error:  # a zip file can be broken in too many ways to list
                self._add(name, f"is damaged ({type(error).__name__}: {error})")

        with ThreadPoolExecutor() as pool:
            list(pool.map(check, shards))

    def _shards(self, metadata: Metadata) -> Iterator[_Shard]:
        places: Mapping[MetadataIndex, StorageInfo] = metadata.storage_data or {}
        known = 0
        for key, entry in metadata.state_dict_metadata.items():
            wanted: list[tuple[MetadataIndex, int | None]] = [(MetadataIndex(key), None)]
            if not isinstance(entry, BytesStorageMetadata):
                if problem := flaw(entry):
                    self._add(INDEX_FILE, f"says that the shards of {key!r} {problem}")
                width = entry.properties.dtype.itemsize
                wanted = [
                    (MetadataIndex(key, chunk.offsets), math.prod(chunk.sizes) * width)
                    for chunk in entry.chunks
                ]
            for index, size in wanted:
                if (place := places.get(index)) is None:
                    self._add(INDEX_FILE, f"does not say where a shard of {key!r} lies")
                else:
                    known += 1
                    yield _Shard(key, place, size)
        if known < len(places):
            self._add(INDEX_FILE, "says where shards lie that it does not describe")

    def _check_ranges(self, name: str, shards: list[_Shard], *, complete: bool) -> None:
        file = inside(self._path, name)
        if not file.is_file():
            return self._add(name, "is missing")
        size, end = file.stat().st_size, 0
        for shard in sorted(shards, key=lambda shard: shard.place.offset):
            start, stop = shard.place.offset, shard.place.offset + shard.place.length
            if stop > size:
                return self._add(
                    name, f"has {size} bytes, {stop} are needed for {shard.key!r}: truncated"
                )
            if start != end and complete:
                return self._add(name, f"has unknown contents from byte {end} to {start}")
            end = stop
        if end != size and complete:
            self._add(name, f"has {size - end} bytes after its last shard")
        return None

    def _check_archives(self, name: str, shards: list[_Shard], contents: Contents) -> None:
        with open_regular(self._path / name) as stream:
            for shard in shards:
                if transforms_of(shard.place):  # compressed: no archive at this level
                    continue
                window = _Window(stream, shard.place)
                if problem := _archive_problem(window, shard.size):
                    return self._add(name, f"is damaged: {shard.key!r} {problem}")
                if shard.size is None:
                    self._read(name, partial(contents.read_object, shard.key))
                self._advance(shard.place.length)
        return None


@dataclass(frozen=True)
class _Shard:
    key: str
    place: StorageInfo
    size: int | None  # bytes of a tensor; None for a byte entry


class _Window(io.RawIOBase):
    """A part of a file, with the interface of a file."""

    def __init__(self, stream: BinaryIO, place: StorageInfo) -> None:
        self._stream, self._start, self._size = stream, place.offset, place.length
        self._at = 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning")
        self._at = base + offset
        return self._at

    @override
    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._stream.seek(self._start + self._at)
        left = max(self._size - self._at, 0)
        data = self._stream.read(min(len(buffer), left))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _archive_problem(window: _Window, size: int | None) -> str | None:
    """Return the problem of an archive of ``torch.save`` as the end of a sentence; None if none.

    ``size``: see :class:`_Shard`.
    """
    # zipfile accepts archives with other bytes before and after them.
    window.seek(-_ZIP_END, os.SEEK_END)
    end = window.read(_ZIP_END)
    with zipfile.ZipFile(io.BufferedReader(window, _PIECE)) as archive:
        parts = archive.infolist()
        whole = end[:4] == b"PK\5\6" and end[-2:] == b"\0\0"
        if not whole or min(part.header_offset for part in parts) != 0:
            return "does not begin and end where it should"
        # torch.serialization.set_crc32_options(False) leaves zeros.
        if any(part.CRC for part in parts) and (bad := archive.testzip()):
            return f"has a wrong checksum in {bad.partition('/')[2]}"
    stored = sum(part.file_size for part in parts if "/data/" in part.filename)
    if size is not None and stored < size:
        return f"has {stored} bytes of data, and {size} are needed"
    return None
