"""Writing this rank's file: entries in sequence, checksummed during the write, then synced."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, TypeGuard

import torch
from xxhash import xxh3_64, xxh3_128

from megapg.checkpoint.manifest import FileSum
from megapg.checkpoint.planning import Item
from megapg.torch_private import StorageInfo

_PIECE = 2**19  # bytes to checksum and write at a time; they still fit into the processor's cache
_STRETCH = 16 * 2**20  # bytes after which the disk starts to write
_ALIGNED = 64  # bytes: the alignment of the copies of tensors


class Memory:
    """A buffer for the copies of one save.

    It is reused by the next save, because writing to newly allocated memory takes several times as
    long.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copies(self, items: Sequence[Item]) -> list[Item]:
        """Return the items with copies of their data, which last until the next call."""
        size = sum(_room(data) for _, data in items if _is_plain(data))
        if size > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            self._bytes = _fresh(size)
        found, start = list[Item](), 0
        for item, data in items:
            if isinstance(data, io.BytesIO):
                found.append((item, data))
            elif _is_plain(data):
                place = self._bytes[start : start + data.nbytes].view(data.dtype).view(data.shape)
                found.append((item, place.copy_(data.detach())))
                start += _room(data)
            else:
                found.append((item, data.detach().to("cpu", copy=True)))
        return found


def _fresh(size: int) -> torch.Tensor:
    """Allocate memory in huge pages, if the system has them: a copy takes a fifth less time."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _is_plain(data: torch.Tensor | io.BytesIO) -> TypeGuard[torch.Tensor]:
    """True if the data is a plain, dense tensor."""
    return (
        isinstance(data, torch.Tensor)
        and type(data) in (torch.Tensor, torch.nn.Parameter)
        and data.layout is torch.strided
        and not data.is_quantized
    )


def _room(data: torch.Tensor) -> int:
    """Return the bytes of a copy, with padding to the next aligned address."""
    return -(-data.nbytes // _ALIGNED) * _ALIGNED


def write_items(
    directory: Path,
    rank: int,
    items: Sequence[Item],
    progress: Callable[[], None],
    busy: Callable[[], AbstractContextManager[None]],
) -> tuple[list[StorageInfo], dict[str, FileSum]]:
    """Write the items, if any, into one file, ``__<rank>_0.distcp``, as torch's checkpoints do.

    ``progress`` is called at least once for every 16 MiB. ``busy`` is entered for long operations
    that can't call it.

    Returns:
        The place of each item, in order, and the size and checksums of the file.
    """
    if not items:
        return [], {}
    name = f"__{rank}_0.distcp"
    places, entries = [], []
    with (directory / name).open("xb", buffering=_PIECE) as file:
        stream = _Stream(file, progress)
        for _, data in items:
            start, stream.entry = stream.size, xxh3_64()
            _write(stream, data)
            entries.append(stream.entry.hexdigest())
            places.append(StorageInfo(name, start, stream.size - start))
        file.flush()
        with busy():
            os.fsync(file.fileno())
    whole = stream.whole.hexdigest()
    return places, {name: FileSum(stream.size, whole, "xxh3_128", tuple(entries))}


class _Stream:
    """The part of a file's interface that ``torch.save`` needs. Checksums what it writes."""

    def __init__(self, file: BinaryIO, progress: Callable[[], None]) -> None:
        self._file, self._progress = file, progress
        self._begun = 0
        self.size = 0
        self.whole, self.entry = xxh3_128(), xxh3_64()  # of the file, and of the current entry
        self.trouble: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                self.entry.update(piece)
                self.whole.update(piece)
                self._file.write(piece)
                self.size += len(piece)
                self._start_disk()
                self._progress()
        except Exception as error:
            self.trouble = error
            raise
        return len(view)

    def flush(self) -> None:
        """Do nothing. torch calls it after every tensor; the file is flushed once, at its end."""

    def _start_disk(self) -> None:
        """Make the disk start writing, so that less is left to fsync."""
        if self.size - self._begun >= _STRETCH:
            with contextlib.suppress(OSError):  # only a hint
                os.posix_fadvise(
                    self._file.fileno(),
                    self._begun,
                    self.size - self._begun,
                    os.POSIX_FADV_DONTNEED,
                )
            self._begun = self.size


def _write(stream: _Stream, data: torch.Tensor | io.BytesIO) -> None:
    """Write one entry."""
    if isinstance(data, io.BytesIO):
        stream.write(data.getvalue())
        return
    tensor = data.detach().cpu()
    if type(tensor) is torch.Tensor:
        tensor = _alone(tensor.contiguous())
    try:
        torch.save(tensor, stream)  # type: ignore[arg-type]  # it needs write() and flush() only
    except RuntimeError:
        if stream.trouble is None:
            raise
        raise stream.trouble from None  # torch would report an unfinished archive instead


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values without the rest of their storage, which torch would save too."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    if not tensor.numel():
        return tensor.clone()
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)
