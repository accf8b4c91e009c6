"""Checks that every file of a checkpoint is still as it was saved: :func:`verify`.

The files are compared with the manifest. Without a manifest, they are checked against each other:
``.metadata`` has the place of each shard, and each shard is an archive with checksums inside. A
load checks the entries that it reads: :mod:`megapg.checkpoint.entries`.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megapg.checkpoint.contents import (
    COMMON_KEY,
    NAME_ONE,
    Contents,
    read_common,
    read_metadata,
    wrong_format,
    wrong_name,
)
from megapg.checkpoint.directory import COMMON_FILE, FORMAT_FILE, INDEX_FILE, what_is_missing
from megapg.checkpoint.entries import (
    Entry,
    EntryReader,
    check_ends,
    check_places,
    checksums_of,
    end_of,
    entries_of,
)
from megapg.checkpoint.files import read_json
from megapg.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    partial_of,
    read_manifest,
    sum_of,
)
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from megapg.torch_private import transforms_of

T = TypeVar("T")

_READERS = 4  # threads that read shards; each one holds an entry in memory
_SUFFIX = ".distcp"
_READ_BY_ALL = {MANIFEST_FILE, INDEX_FILE, COMMON_FILE, FORMAT_FILE}
_NOT_OF_MODEL = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state")


@dataclass(frozen=True)
class Report:
    """The result of :func:`verify`.

    Attributes:
        path: the directory of the checkpoint.
        problems: one line per damaged file, beginning with its name.
        entries: keys of the tensors and objects that are damaged; empty if that is unknown.
        weights: True if ``load_checkpoint(weights_only=True)`` reads no damaged entry.
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
    entries: tuple[str, ...] = ()
    weights: bool = True

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
            some = partial_of(expected.about if expected else {})
            self._check_places(metadata, some, archives=alone)
        entries = self._damaged(metadata, expected) if metadata is not None else []
        self._on_progress(self._total, self._total)
        return Report(
            path=self._path,
            problems=tuple(f"{name}: {self._problems[name]}" for name in sorted(self._problems)),
            manifest=expected is not None,
            files=len(self._files),
            size=self._total,
            entries=tuple(entries),
            weights=not self._problems.keys() & _READ_BY_ALL
            and not what_is_missing(self._path)
            and all(_NOT_OF_MODEL.match(key) for key in entries),
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
        known = expected.files
        for name in self._files.keys() - known.keys():
            if name.endswith(_SUFFIX) or name in (COMMON_FILE, FORMAT_FILE, INDEX_FILE):
                self._add(name, "is not of this checkpoint: the manifest does not list it")
        for name in known.keys() - self._files.keys():
            self._add(name, "is missing")
        there = known.keys() & self._files.keys()
        wrong_size = {
            name: f"has {self._files[name]} bytes and had {size}"
            + (": truncated" if self._files[name] < size else "")
            for name in there
            if (size := known[name].size) not in (None, self._files[name])
        }
        # A file of the wrong size is read only if it might be another file of the checkpoint.
        sizes = {file.size for file in known.values()}
        read = [name for name in there if name not in wrong_size or self._files[name] in sizes]

        def digest(name: str) -> str | None:
            path, algorithm = self._path / name, known[name].algorithm
            found = self._read(name, lambda: sum_of(path, algorithm, self._advance))
            return None if found is None else found.digest

        with ThreadPoolExecutor() as pool:
            actual = dict(zip(read, pool.map(digest, read), strict=True))
        owners = {file.digest: name for name, file in known.items() if file.size != 0}
        for name in there:
            if actual.get(name) == known[name].digest:
                continue
            owner = owners.get(actual.get(name) or "")
            if owner is not None and actual.get(owner) == known[name].digest:
                self._add(name, f"was swapped with {owner}")
            elif owner is not None:
                self._add(name, f"holds the contents of {owner}")
            else:
                self._add(name, wrong_size.get(name, "has changed: its checksum is another"))

    def _damaged(self, metadata: Metadata, manifest: Manifest | None) -> list[str]:
        """Return the keys of the entries in damaged shards that can't be read."""
        try:
            sums = checksums_of(self._path, metadata, manifest) if manifest else None
        except BrokenCheckpointError:
            sums = None
        some = partial_of(manifest.about if manifest else {})
        found = set()
        with closing(EntryReader(self._path, sums, check=True)) as reader:
            for key in metadata.state_dict_metadata if self._problems else ():
                try:
                    for entry in entries_of(self._path, metadata, key, partial=some):
                        if entry.place.relative_path in self._problems:
                            (reader.load if entry.chunk is None else reader.tensor)(entry)
                except Exception:  # an archive can be broken in too many ways to list
                    found.add(key)
        return sorted(found)

    def _check_config(self, *, needed: bool) -> None:
        """Check ``metadata.json``, by which Megatron knows the format; torch alone writes none."""
        if FORMAT_FILE not in self._files:
            if needed:
                self._add(FORMAT_FILE, "is missing")
            return
        config = self._read(FORMAT_FILE, lambda: read_json(self._path / FORMAT_FILE))
        if FORMAT_FILE not in self._problems and (problem := wrong_format(config)):
            self._add(FORMAT_FILE, problem)

    def _check_places(self, metadata: Metadata, some: frozenset[str], *, archives: bool) -> None:
        """Compare the places in ``.metadata`` with the shard files. Check archives on request."""
        shards: dict[str, list[Entry]] = defaultdict(list)
        for key in metadata.state_dict_metadata:
            read = partial(entries_of, self._path, metadata, key, partial=some)
            entries = self._read(INDEX_FILE, read)
            for entry in entries or ():
                shards[entry.place.relative_path].append(entry)
        if sum(map(len, shards.values())) < len(metadata.storage_data or {}):
            self._add(INDEX_FILE, "says where shards lie that it does not describe")
        if archives:
            self._read(INDEX_FILE, partial(check_places, self._path, metadata))
        for name in self._files.keys() - shards.keys():
            if name.endswith(_SUFFIX):
                self._add(name, "is not of this checkpoint: .metadata does not refer to it")
        contents = Contents(self._path, metadata, {}, check=True)

        def check(name: str) -> None:
            try:
                self._read(name, partial(check_ends, self._path, shards[name]))
                if archives and name not in self._problems:
                    self._read(name, partial(self._check_archives, name, shards[name], contents))
            except Exception as error:  # an archive can be broken in too many ways to list
                self._add(name, f"is damaged ({type(error).__name__}: {error})")

        # An archive is read into memory as a whole.
        with ThreadPoolExecutor(1 if archives else _READERS) as pool:
            list(pool.map(check, shards))

    def _check_archives(self, name: str, entries: list[Entry], contents: Contents) -> None:
        end = max(end_of(entry.place) for entry in entries)
        if (size := (self._path / name).stat().st_size) != end:
            return self._add(name, f"has {size - end} bytes after its last shard")
        with closing(contents.reader()) as reader:
            for entry in entries:
                if transforms_of(entry.place):  # compressed: no archive at this level
                    continue
                if entry.chunk is None:
                    reader.load(entry)
                else:
                    found = reader.tensor(entry).dtype
                    saved = contents.metadata.state_dict_metadata[entry.key].properties.dtype  # type: ignore[union-attr]  # a tensor
                    if found != saved:
                        problem = f"is damaged: {entry.key!r} has {found}, and {saved} was saved"
                        return self._add(name, problem)
                self._advance(entry.place.length)
        return None
