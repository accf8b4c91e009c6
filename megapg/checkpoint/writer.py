"""Writing this rank's file: entries in sequence, checksummed during the write, then synced."""

from __future__ import annotations

import contextlib
import hashlib
import io
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from io import RawIOBase
from pathlib import Path
from typing import Self, TypeGuard

import numpy as np
import torch

from megapg.checkpoint.archive import Seal
from megapg.checkpoint.manifest import FileSum
from megapg.checkpoint.planning import Item
from megapg.torch_private import StorageInfo

# Bytes: the largest single write, and the smallest piece that is written alone.
_PIECE = 16 * 2**20
_LARGE = 2**18
# Bytes: the alignment of the copies of tensors.
_ALIGNED = 64


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
    places, seals = [], []
    with (directory / name).open("xb", buffering=0) as file, _Stream(file, progress) as stream:
        for _, data in items:
            start, stream.seal = stream.size, Seal()
            _write(stream, data)
            seals.append(stream.seal.number())
            places.append(StorageInfo(name, start, stream.size - start))
        stream.flush_small()
        with busy():
            os.fsync(file.fileno())
            digest = stream.digest()
    return places, {name: FileSum(stream.size, digest, tuple(seals))}


class _Stream:
    """The part of a file's interface that ``torch.save`` needs.

    A separate thread computes the checksum from the tensors' memory while the disk writes. Small
    pieces are written together.
    """

    def __init__(self, file: RawIOBase, progress: Callable[[], None]) -> None:
        self._file, self._progress = file, progress
        self._sha256 = hashlib.sha256()
        self._summing = ThreadPoolExecutor(1, "megapg checksum")
        self._small = bytearray()
        self._begun = 0
        self.size = 0
        self.seal = Seal()  # of the current entry
        self.trouble: Exception | None = None
        self.memory: memoryview | None = None  # memory of the current tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._summing.shutdown(cancel_futures=True)

    def digest(self) -> str:
        """Wait for the checksum thread, and return the SHA-256 of all bytes written."""
        self._summing.shutdown()
        return self._sha256.hexdigest()

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        if len(view) < _LARGE:
            self._small += view
            if len(self._small) >= _LARGE:
                self.flush_small()
        else:
            self.flush_small()
            self._put(self._own(view))
        self.size += len(view)
        self.seal.update(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing. torch calls it after every tensor; the file is flushed once, at its end."""

    def flush_small(self) -> None:
        """Write the collected small pieces."""
        small, self._small = self._small, bytearray()
        self._put(memoryview(small))

    def _own(self, view: memoryview) -> memoryview:
        """Return the same bytes in memory that lasts: torch's view ends with the call."""
        if self.memory is not None:
            start = _address(view) - _address(self.memory)
            if 0 <= start <= len(self.memory) - len(view):
                return self.memory[start : start + len(view)]
        return memoryview(bytes(view))

    def _put(self, view: memoryview) -> None:
        try:
            while view:
                piece = view[:_PIECE]
                self._summing.submit(self._sha256.update, piece)
                while piece:
                    piece = piece[self._file.write(piece) or 0 :]
                self._start_disk()
                self._progress()
                view = view[_PIECE:]
        except Exception as error:
            self.trouble = error
            raise

    def _start_disk(self) -> None:
        """Make the disk start writing, so that less is left to fsync."""
        end = self._file.tell()
        if end - self._begun >= _PIECE:
            with contextlib.suppress(OSError):  # only a hint
                os.posix_fadvise(
                    self._file.fileno(), self._begun, end - self._begun, os.POSIX_FADV_DONTNEED
                )
            self._begun = end


def _write(stream: _Stream, data: torch.Tensor | io.BytesIO) -> None:
    """Write one entry."""
    if isinstance(data, io.BytesIO):
        stream.write(data.getvalue())
        return
    tensor = data.detach().cpu()
    if type(tensor) is torch.Tensor:
        tensor = _alone(tensor.contiguous())
        stream.memory = memoryview(_bytes(tensor))  # type: ignore[arg-type]  # it is a Buffer
    try:
        torch.save(tensor, stream)  # type: ignore[arg-type]  # it needs write() and flush() only
    except RuntimeError:
        if stream.trouble is None:
            raise
        raise stream.trouble from None  # torch would report an unfinished archive instead
    finally:
        stream.memory = None


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values without the rest of their storage, which torch would save too."""
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    if not tensor.numel():
        return tensor.clone()
    return torch.from_numpy(_bytes(tensor)).view(tensor.dtype).view(tensor.shape)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data
