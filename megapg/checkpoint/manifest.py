"""What every file of a checkpoint was when it was saved, and whether it still is.

The manifest is ``integrity.json``, which Megatron-core 0.19 writes and checks too (see
``megatron/core/dist_checkpointing/validation.py``): a SHA-256 for each file. megapg adds the sizes,
a note about the save, and a checksum of the manifest itself, which Megatron-core passes over.

:func:`verify` compares. Where there is no manifest, it checks what the files tell about themselves:
``.metadata`` says where each shard lies, and each shard is an archive with checksums inside.
"""

from __future__ import annotations

import hashlib
import io
import json
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

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megapg.checkpoint.contents import (
    COMMON_KEY,
    Contents,
    inside,
    open_regular,
    read_common,
    read_metadata,
)
from megapg.checkpoint.names import COMMON_FILE, FORMAT_FILE, INDEX_FILE, MANIFEST_FILE
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)

T = TypeVar("T")

_ALGORITHM = "sha256"
_PIECE = 2**20  # bytes to read at once
_ZIP_END = 22  # bytes of the record that ends an archive without a comment
_SUFFIX = ".distcp"


@dataclass(frozen=True)
class FileSum:
    """A file's size in bytes and the SHA-256 of its contents, 64 hex digits."""

    size: int
    sha256: str


def sum_of(path: Path, on_progress: Callable[[int], None] = lambda done: None) -> FileSum:
    """Size and checksum of a file, read piece by piece.

    Args:
        path: the file.
        on_progress: called with the number of bytes of each piece.

    Raises:
        BrokenCheckpointError: it is missing or can't be read.
    """
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_PIECE))
    with open_regular(path) as stream:
        while count := _read_into(stream, buffer, path):
            digest.update(buffer[:count])
            size += count
            on_progress(count)
    return FileSum(size, digest.hexdigest())


def _read_into(stream: BinaryIO, buffer: memoryview, path: Path) -> int:
    try:
        return stream.readinto(buffer)  # type: ignore[attr-defined,no-any-return]
    except OSError as error:
        problem = f"{path.name}: can't be read ({error.strerror})"
        raise BrokenCheckpointError(f"{path.parent}: {problem}", [problem]) from error


def write_file(path: Path, data: bytes) -> FileSum:
    """Write a small file that is not there yet, and sync it.

    Raises:
        OSError: it can't be written.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(len(data), hashlib.sha256(data).hexdigest())


def write_manifest(
    directory: Path, files: Mapping[str, FileSum], about: Mapping[str, object]
) -> None:
    """Write ``integrity.json``: on disk when this returns, and complete or not there at all.

    Args:
        directory: of the checkpoint; it has nothing else to be written.
        files: name -> sum, of every file of the directory.
        about: plain values to note about the save.

    Raises:
        OSError: it can't be written.
    """
    content: dict[str, object] = {
        "algorithm": _ALGORITHM,
        "files": {name: files[name].sha256 for name in sorted(files)},
        "sizes": {name: files[name].size for name in sorted(files)},
        "megapg": dict(about),
    }
    content["checksum"] = _checksum(content)
    final, unfinished = directory / MANIFEST_FILE, directory / f"{MANIFEST_FILE}.partial"
    write_file(unfinished, json.dumps(content, indent=2).encode())
    unfinished.replace(final)
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(content: Mapping[str, object]) -> str:
    rest = {name: value for name, value in content.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# --- verify ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What :func:`verify` found.

    Attributes:
        path: the directory of the checkpoint.
        problems: one line per file that is not as it was, each of which begins with its name.
        manifest: whether there was a manifest to compare with. Without one, a file that was
            replaced as a whole by another of the same form, or bits changed in the padding between
            the parts of a file, can't be told.
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
        """Whether nothing was found."""
        return not self.problems


def verify(
    directory: str | os.PathLike[str], *, on_progress: Callable[[int, int], None] | None = None
) -> Report:
    """Check every file of one checkpoint: missing, truncated, changed, swapped, or not its own.

    Needs no GPU, no process group and no Megatron-core, and runs nothing that a file says. It reads
    everything once, some files at a time.

    Args:
        directory: of one checkpoint, for example ``checkpoints/iter_0000123``.
        on_progress: called with the bytes read so far and those to read in all.

    Raises:
        CheckpointNotFoundError: there is no such directory, or no checkpoint in it.
    """
    path = Path(directory)
    files = _files(path)
    if not files:
        raise CheckpointNotFoundError(
            f"{path} has no files. Name the directory of one checkpoint, such as "
            "checkpoints/iter_0000123."
        )
    return _Check(path, files, on_progress).run()


def _files(path: Path) -> dict[str, int]:
    """Name -> size of everything in the directory but directories and the manifest."""
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        raise CheckpointNotFoundError(
            f"{path} can't be read ({error.strerror}). Name the directory of one checkpoint, such "
            "as checkpoints/iter_0000123."
        ) from error
    found = {}
    for entry in entries:
        with suppress(OSError):  # a link to nothing: missing
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
        expected = self._manifest()
        if expected is not None:
            self._compare(expected)
        changed = INDEX_FILE in self._problems
        metadata = None if changed else self._read(INDEX_FILE, lambda: read_metadata(self._path))
        of_megatron = metadata is not None and COMMON_KEY in metadata.state_dict_metadata
        self._check_config(needed=of_megatron or COMMON_FILE in self._files)
        if metadata is not None:
            if not self._problems.keys() & {COMMON_FILE, FORMAT_FILE}:
                home = self._home_of_common(metadata)
                self._read(home, lambda: read_common(self._path, metadata))
                if expected is None and COMMON_FILE in self._files:
                    self._check_common()
            self._check_places(metadata, archives=expected is None)
        self._on_progress(self._total, self._total)
        return Report(
            path=self._path,
            problems=tuple(f"{name}: {self._problems[name]}" for name in sorted(self._problems)),
            manifest=expected is not None,
            files=len(self._files),
            size=self._total,
        )

    def _add(self, name: str, problem: str) -> None:
        # The first thing that is wrong with a file usually explains the others.
        with self._lock:
            self._problems.setdefault(name, problem)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            self._on_progress(self._done, self._total)

    def _read(self, name: str, read: Callable[[], T]) -> T | None:
        """Run a reader; what it raises becomes a problem of the file it names, or of this one."""
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

    # -- the manifest

    def _manifest(self) -> dict[str, tuple[str, int | None]] | None:
        """Name -> SHA-256 and size, as saved; None where there is no manifest to go by."""
        if not os.path.lexists(self._path / MANIFEST_FILE):
            return None
        try:
            with open_regular(self._path / MANIFEST_FILE) as stream:
                content = json.load(stream)
            return _expected(content)
        except BrokenCheckpointError as error:
            self._add(*error.problems[0].split(": ", 1))
        except (ValueError, RecursionError, OSError) as error:
            known = type(error) is ValueError or isinstance(error, OSError)
            reason = str(error) if known else "it is no JSON"
            self._add(MANIFEST_FILE, f"is damaged or was edited ({reason})")
        return None

    def _compare(self, expected: Mapping[str, tuple[str, int | None]]) -> None:
        for name in self._files.keys() - expected.keys():
            if name.endswith(_SUFFIX) or name in (COMMON_FILE, FORMAT_FILE, INDEX_FILE):
                self._add(name, "is not of this checkpoint: the manifest does not list it")
        for name in expected.keys() - self._files.keys():
            self._add(name, "is missing")
        # A file of the wrong size is read only if it might be another one of the checkpoint.
        sizes = {size for _, size in expected.values()}
        wrong_size = {
            name: f"has {self._files[name]} bytes and had {size}"
            + (": truncated" if self._files[name] < size else "")
            for name, (_, size) in expected.items()
            if name in self._files and size not in (None, self._files[name])
        }
        read = [
            name
            for name in expected.keys() & self._files.keys()
            if name not in wrong_size or self._files[name] in sizes
        ]
        with ThreadPoolExecutor() as pool:
            sums = dict(zip(read, pool.map(self._sum, read), strict=True))
        actual = {name: found.sha256 for name, found in sums.items() if found is not None}
        owners = {sha256: name for name, (sha256, size) in expected.items() if size != 0}
        for name in expected.keys() & self._files.keys():
            if actual.get(name) == expected[name][0]:
                continue
            owner = owners.get(actual.get(name, ""))
            if owner is not None and actual.get(owner) == expected[name][0]:
                self._add(name, f"was swapped with {owner}")
            elif owner is not None:
                self._add(name, f"holds the contents of {owner}")
            else:
                self._add(name, wrong_size.get(name, "has changed: its checksum is another"))

    def _sum(self, name: str) -> FileSum | None:
        return self._read(name, lambda: sum_of(self._path / name, self._advance))

    # -- what the files tell about themselves

    def _check_config(self, *, needed: bool) -> None:
        """``metadata.json``, by which Megatron knows the format; torch alone writes none."""
        if FORMAT_FILE not in self._files:
            if needed:
                self._add(FORMAT_FILE, "is missing")
            return
        try:
            with open_regular(self._path / FORMAT_FILE) as stream:
                config = json.load(stream)
        except BrokenCheckpointError as error:
            self._add(*error.problems[0].split(": ", 1))
        except (ValueError, RecursionError):
            self._add(FORMAT_FILE, "is damaged (it is no JSON)")
        else:
            backend = config.get("sharded_backend") if isinstance(config, dict) else None
            if backend != "torch_dist":
                self._add(FORMAT_FILE, f"names the format {backend!r}, not 'torch_dist'")

    def _home_of_common(self, metadata: Metadata) -> str:
        place = (metadata.storage_data or {}).get(MetadataIndex(COMMON_KEY))
        if place is None or COMMON_FILE in self._files:
            return COMMON_FILE
        return str(place.relative_path)

    def _check_common(self) -> None:
        """``common.pt`` loads; the sums inside of it tell whether as it was saved."""
        try:
            with open_regular(self._path / COMMON_FILE) as stream:
                whole = _StorageInfo(COMMON_FILE, 0, self._files[COMMON_FILE])
                if problem := _archive_problem(_Window(stream, whole), None):
                    self._add(COMMON_FILE, f"is damaged: it {problem}")
        except Exception as error:  # a zip file can be broken in too many ways to list
            self._add(COMMON_FILE, f"is damaged ({type(error).__name__}: {error})")

    def _check_places(self, metadata: Metadata, *, archives: bool) -> None:
        """What ``.metadata`` says about the shards, against the files; their insides on request."""
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
        places: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data or {}
        known = 0
        for key, entry in metadata.state_dict_metadata.items():
            wanted: list[tuple[MetadataIndex, int | None]] = [(MetadataIndex(key), None)]
            if not isinstance(entry, BytesStorageMetadata):
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
                if shard.place.transform_descriptors:  # compressed: no archive at this level
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
    place: _StorageInfo
    size: int | None  # bytes of a tensor; None for a byte entry


def _expected(content: object) -> dict[str, tuple[str, int | None]]:
    """The manifest's own claims; ValueError says which part makes no sense."""
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    if content.get("algorithm", _ALGORITHM) != _ALGORITHM:
        raise ValueError(f"its algorithm is {content['algorithm']!r}, not {_ALGORITHM!r}")
    ours = "megapg" in content or "checksum" in content
    if ours and content.get("checksum") != _checksum(content):
        raise ValueError("its own checksum is another")
    files, sizes = content.get("files"), content.get("sizes", {})
    if not isinstance(files, dict) or not isinstance(sizes, dict):
        raise ValueError("it lists no files")
    expected = {}
    for name, sha256 in files.items():
        size = sizes.get(name)
        if not isinstance(sha256, str) or not (size is None or type(size) is int):
            raise ValueError(f"what it says of {name!r} is no checksum and size")
        if not name or "/" in name or name in (".", "..", MANIFEST_FILE):
            raise ValueError(f"{name!r} is no file of a checkpoint")
        expected[name] = (sha256, size)
    return expected


class _Window(io.RawIOBase):
    """A part of a file that looks like a file."""

    def __init__(self, stream: BinaryIO, place: _StorageInfo) -> None:
        self._stream, self._start, self._size = stream, place.offset, place.length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._stream.seek(self._start + self._at)
        left = max(self._size - self._at, 0)
        data = self._stream.read(min(len(buffer), left))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _archive_problem(window: _Window, size: int | None) -> str | None:
    """What is wrong with an archive of ``torch.save``, as the end of a sentence; None if nothing.

    Args:
        window: the archive, from its first byte to its last.
        size: bytes of the tensor in it; None for other objects.
    """
    # zipfile takes archives with anything before and behind them.
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
