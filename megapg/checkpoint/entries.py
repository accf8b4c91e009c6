"""Reading the entries of a checkpoint's shards, with a check of each.

An entry is an archive of ``torch.save`` with one tensor or object. ``.metadata`` has its place, and
megapg's manifest its checksum.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from xxhash import xxh3_64

from megapg.checkpoint import archive
from megapg.checkpoint.directory import INDEX_FILE
from megapg.checkpoint.files import broken, open_regular
from megapg.checkpoint.manifest import Manifest
from megapg.checkpoint.safe_torch import TensorForm, load_safely, parse_tensor_form
from megapg.errors import BrokenCheckpointError, CheckpointError, UnsafeCheckpointError
from megapg.torch_private import StorageInfo, transforms_of

_PIECE = 2**19  # bytes to read and to checksum at a time; they still fit into the processor's cache


class Entry(NamedTuple):
    """An entry as ``.metadata`` describes it."""

    key: str
    place: StorageInfo
    chunk: ChunkStorageMetadata | None  # None for an object


class EntryReader:
    """Reads the entries of one checkpoint, a file at a time. For one thread.

    Entries are compared with ``checksums`` (of :func:`checksums_of`). If there is no manifest,
    ``checksums`` is None, and the CRC-32s inside the entries are used. Without ``check`` only sizes
    are checked.
    """

    def __init__(
        self, path: Path, checksums: Mapping[str, Mapping[int, str]] | None, *, check: bool
    ) -> None:
        self._path, self._checksums, self._check = path, checksums, check
        self._open: tuple[str, BinaryIO] | None = None
        self._buffer = memoryview(bytearray())
        self._forms: dict[bytes, TensorForm | None] = {}

    def close(self) -> None:
        """Close the file that was read last. Reading opens it again."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Return the tensor of a chunk, on the CPU. The next read overwrites it.

        Raises:
            BrokenCheckpointError: a file is missing, too short or damaged; names file and key.
            UnsafeCheckpointError: its file is outside of the checkpoint, or it would run code.
            CheckpointError: it was written in a form that megapg does not read.
        """
        whole = self._read(entry)
        plain = self._plain(self._members(whole, entry))
        found = self._load(whole, entry) if plain is None else plain
        shape = None if entry.chunk is None else entry.chunk.sizes
        if not isinstance(found, torch.Tensor) or found.shape != shape:
            has = list(found.shape) if isinstance(found, torch.Tensor) else "no tensor"
            raise self._damaged(entry, f"it has {has}, and {list(shape or ())} was saved")
        return found

    def _plain(self, members: Mapping[str, memoryview]) -> torch.Tensor | None:
        """Return the tensor without a copy; None if it is not of the usual form."""
        pickled = bytes(members.get("data.pkl", b""))
        if pickled not in self._forms:
            self._forms[pickled] = parse_tensor_form(pickled)
        form, order = self._forms[pickled], bytes(members.get("byteorder", b""))
        data = None if form is None else members.get(f"data/{form.storage}")
        if form is None or data is None or len(data) != form.bytes:
            return None
        if order != sys.byteorder.encode():
            return None
        if not form.bytes:
            return torch.empty(form.size, dtype=form.dtype)
        flat = torch.frombuffer(data, dtype=form.dtype)
        return flat.as_strided(form.size, form.stride, form.offset)

    def load(self, entry: Entry) -> object:
        """Return the tensor or object of an entry; raises as :meth:`tensor`."""
        whole = self._read(entry)
        self._members(whole, entry)
        return self._load(whole, entry)

    def _load(self, whole: memoryview, entry: Entry) -> object:
        file = self._path / entry.place.relative_path
        try:
            return load_safely(bytes(whole), f"{file}, in its entry {entry.key!r},")
        except BrokenCheckpointError as error:
            raise self._damaged(entry, "torch can't load it") from error

    def _read(self, entry: Entry) -> memoryview:
        """Return the bytes of an entry, in a buffer that the next call reuses."""
        place = entry.place
        if transforms := transforms_of(place):
            raise CheckpointError(
                f"{self._path}: {entry.key!r} was written through {', '.join(transforms)}, which "
                "megapg does not read. Load it with torch's own reader."
            )
        stream = self._file(place.relative_path)
        size, needed = os.fstat(stream.fileno()).st_size, end_of(place)
        if size < needed:  # checked before the buffer is allocated
            file = self._path / place.relative_path
            raise broken(file, f"has {size} bytes, {needed} are needed")
        if len(self._buffer) < place.length:
            self._buffer = memoryview(bytearray(place.length))
        whole = self._buffer[: place.length]
        expected, found, done = self._checksum(place), xxh3_64(), 0
        while done < place.length:
            piece = whole[done : done + _PIECE]
            try:
                count = os.preadv(stream.fileno(), [piece], place.offset + done)
            except OSError as error:
                raise self._damaged(entry, f"can't read it: {error.strerror}") from error
            if not count:
                raise self._damaged(entry, "the file was cut off meanwhile")
            if expected is not None:
                found.update(piece[:count])
            done += count
        if expected not in (None, found.hexdigest()):
            raise self._damaged(entry, "its checksum is another")
        return whole

    def _checksum(self, place: StorageInfo) -> str | None:
        """Return the recorded checksum of an entry; None if there is none or nothing is checked."""
        checksums = self._checksums or {}
        return checksums.get(place.relative_path, {}).get(place.offset) if self._check else None

    def _members(self, whole: memoryview, entry: Entry) -> Mapping[str, memoryview]:
        """Return the members of an entry; none if it is no archive and nothing is checked.

        The CRC-32s are checked unless the manifest has a checksum of the entry.
        """
        check = self._check and self._checksum(entry.place) is None
        try:
            return archive.members(whole, check=check)
        except ValueError as error:
            if self._check:
                raise self._damaged(entry, str(error)) from error
            return {}

    def _damaged(self, entry: Entry, problem: str) -> BrokenCheckpointError:
        file = self._path / entry.place.relative_path
        return broken(file, f"is damaged in its entry {entry.key!r}: {problem}")

    def _file(self, name: str) -> BinaryIO:
        """Return an open file of shards."""
        if self._open is None or self._open[0] != name:
            self.close()
            if self._checksums is not None and name not in self._checksums:
                problem = "is not of this checkpoint: the manifest does not list it"
                raise broken(self._path / name, problem)
            self._open = name, open_regular(inside(self._path, name))
        return self._open[1]


def checksums_of(
    path: Path, metadata: Metadata, manifest: Manifest
) -> Mapping[str, Mapping[int, str]]:
    """Return, for each file that the manifest lists, offset of an entry -> its checksum.

    There are no checksums of entries in a manifest of megapg 0.2 or Megatron-core.

    Raises:
        BrokenCheckpointError: ``.metadata`` has other entries than the manifest.
    """
    offsets: dict[str, set[int]] = defaultdict(set)
    for place in (metadata.storage_data or {}).values():
        offsets[place.relative_path].add(place.offset)
    found: dict[str, Mapping[int, str]] = {}
    for name, known in manifest.files.items():
        in_file = sorted(offsets[name]) if known.algorithm == "xxh3_128" else []
        if len(in_file) != len(known.entries):
            problem = f"has {len(in_file)} entries and had {len(known.entries)}"
            raise broken(path / name, problem)
        found[name] = dict(zip(in_file, known.entries, strict=True))
    return found


def check_places(path: Path, metadata: Metadata) -> None:
    """Check that the entries of each file follow one another without gaps, from byte 0.

    Without a manifest, this finds a changed bit in an offset or length in ``.metadata``.

    Raises:
        BrokenCheckpointError: there is a gap or an overlap.
    """
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place in (metadata.storage_data or {}).values():
        found[place.relative_path].append((place.offset, end_of(place)))
    for name, ranges in found.items():
        end = 0
        for start, stop in sorted(ranges):
            if start != end:
                raise broken(
                    path / INDEX_FILE,
                    f"is damaged: it says that entries of {name} "
                    + (f"overlap at byte {start}" if start < end else f"end at byte {end}")
                    + f", and the next begins at {start}" * (start > end),
                )
            end = stop


def entries_of(
    path: Path, metadata: Metadata, key: str, *, partial: Container[str] = ()
) -> list[Entry]:
    """Return the entries of a key: one for each chunk of a tensor, or one for an object.

    ``partial``: keys of tensors that some layers do not have.

    Raises:
        BrokenCheckpointError: ``.metadata`` does not have the place of an entry, or the chunks do
            not make up the tensor.
    """
    index, saved = path / INDEX_FILE, metadata.state_dict_metadata[key]
    chunks: list[ChunkStorageMetadata | None] = [None]
    if isinstance(saved, TensorStorageMetadata):
        chunks = [*saved.chunks]
        if problem := flaw(saved, partial=key in partial):
            raise broken(index, f"says that the shards of {key!r} {problem}")
    found = []
    for chunk in chunks:
        at = MetadataIndex(key) if chunk is None else MetadataIndex(key, chunk.offsets)
        if (place := (metadata.storage_data or {}).get(at)) is None:
            raise broken(index, f"does not say where a shard of {key!r} lies")
        found.append(Entry(key, place, chunk))
    return found


def check_ends(path: Path, entries: Iterable[Entry]) -> None:
    """Check that each file of these entries exists and is long enough.

    Raises:
        BrokenCheckpointError: names the file.
    """
    last: dict[str, Entry] = {}
    for entry in entries:
        name = entry.place.relative_path
        if name not in last or end_of(entry.place) > end_of(last[name].place):
            last[name] = entry
    for name, entry in last.items():
        file, needed = inside(path, name), end_of(entry.place)
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
        if size < needed:
            problem = f"has {size} bytes, {needed} are needed for {entry.key!r}: truncated"
            raise broken(file, problem)


def end_of(place: StorageInfo) -> int:
    """Return the offset of the first byte after an entry."""
    return place.offset + place.length


def weight_of(key: str) -> str:
    """Return the key of the weight that an optimizer's state belongs to; empty if it is no such
    state.
    """
    found = _STATE.match(key)
    return key[found.end() :] if found else ""


def is_of_optimizer(key: str) -> bool:
    """True if the key is one of an optimizer's state, in any form."""
    return _OF_OPTIMIZER.match(key) is not None


_OF_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"(chained_\d+\.)?optimizer\.state\.[^.]+\.")


def count_of(tensor: TensorStorageMetadata) -> int:
    """Return the number of elements in all chunks of a tensor."""
    return sum(math.prod(chunk.sizes) for chunk in tensor.chunks)


def absent_layers(tensor: TensorStorageMetadata) -> frozenset[int]:
    """Return the layers that a tensor of several layers lacks; none if something else is absent.

    The first axis counts the layers. A layer may have no adapter, or be frozen and have no
    optimizer state.
    """
    if len(tensor.size) < 2 or any(chunk.sizes[0] != 1 for chunk in tensor.chunks):
        return frozenset()
    present = frozenset(chunk.offsets[0] for chunk in tensor.chunks)
    whole = count_of(tensor) == len(present) * math.prod(tensor.size[1:])
    return frozenset(range(tensor.size[0])) - present if whole else frozenset()


def flaw(tensor: TensorStorageMetadata, *, partial: bool = False) -> str:
    """Return the problem of a tensor's chunks, as in "leave a part of it out"; empty if none.

    Each element must be in exactly one chunk. If ``partial``, whole layers may be absent.
    """
    chunks = [_ranges(chunk) for chunk in tensor.chunks if 0 not in chunk.sizes]
    if any(
        start < 0 or stop > size
        for chunk in chunks
        for (start, stop), size in zip(chunk, tensor.size, strict=True)
    ):
        return "reach beyond its end"
    total = count_of(tensor)
    if total < math.prod(tensor.size) and not (partial and absent_layers(tensor)):
        return "leave a part of it out"
    if total > math.prod(tensor.size) or not _apart(sorted(chunks)):
        return "overlap"
    return ""


def _apart(boxes: list[list[tuple[int, int]]]) -> bool:
    """True if no two boxes overlap. Boxes are sorted; each is the list of its ranges per axis."""
    if len(boxes) < 2:
        return True
    if not boxes[0]:
        return False
    # If the ranges of the first axis do not overlap (layers, for example), check each range alone.
    slabs = [(ranges, [box[1:] for box in same]) for ranges, same in groupby(boxes, itemgetter(0))]
    if all(stop <= start for ((_, stop), _), ((start, _), _) in pairwise(slabs)):
        return all(_apart(same) for _, same in slabs)
    active: list[list[tuple[int, int]]] = []
    for mine in boxes:
        active = [other for other in active if other[0][1] > mine[0][0]]
        for other in active:
            if all(a < d and c < b for (a, b), (c, d) in zip(mine, other, strict=True)):
                return False
        active.append(mine)
    return True


def _ranges(chunk: ChunkStorageMetadata) -> list[tuple[int, int]]:
    return [(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True)]


def inside(path: Path, name: str) -> Path:
    """Return the path of a file that ``.metadata`` names.

    Raises:
        UnsafeCheckpointError: the name leads out of the directory, or may do so through a link.
    """
    pure = pathlib.PurePosixPath(name)
    outside = not name.isprintable() or not name or pure.is_absolute() or ".." in pure.parts
    if outside or any((path / parent).is_symlink() for parent in list(pure.parents)[:-1]):
        raise UnsafeCheckpointError(
            f"{path / INDEX_FILE} says that data lies in {name!r}, outside of the checkpoint"
            f"{'' if outside else ', as there is a link on the way'}. Nothing of it was read. "
            "Don't load this checkpoint."
        )
    return path / pure
