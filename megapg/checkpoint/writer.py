"""Writing this rank's files: entries one after the other, summed while they are written, synced."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megapg.checkpoint.manifest import FileSum
from megapg.checkpoint.planning import Item

# What goes to the disk at once. Bytes.
_PIECE = 16 * 2**20


@dataclass(frozen=True)
class Written:
    """What a rank has written.

    Attributes:
        places: where each item lies, in the order of the items.
        sums: name of a file -> its size and checksum.
    """

    places: list[_StorageInfo]
    sums: dict[str, FileSum]


def snapshot(items: Iterable[Item], ours: Collection[int]) -> list[Item]:
    """The items in main memory, so that training may go on.

    Args:
        items: what is to be written.
        ours: addresses of tensors that nobody else has, and that need no copy; see
            :func:`megapg.checkpoint.optimizer.gathered_memory`.
    """
    return [(item, _apart(data, ours)) for item, data in items]


def _apart(data: torch.Tensor | io.BytesIO, ours: Collection[int]) -> torch.Tensor | io.BytesIO:
    if isinstance(data, io.BytesIO):
        return data
    if data.is_cpu and data.untyped_storage().data_ptr() in ours:
        return data
    return data.detach().to("cpu", copy=True)


def write_items(
    directory: Path,
    rank: int,
    items: Sequence[Item],
    progress: Callable[[], None],
    busy: Callable[[], AbstractContextManager[None]],
) -> Written:
    """Write the items into one file of this rank, in the form of torch's distributed checkpoints.

    Args:
        directory: exists.
        rank: global rank, for the name ``__<rank>_0.distcp``.
        items: what to write; a rank that has nothing writes no file.
        progress: called at least once for every 16 MiB.
        busy: entered for what takes long and can't call it.

    Raises:
        OSError: the file can't be written.
    """
    if not items:
        return Written([], {})
    name = f"__{rank}_0.distcp"
    places = []
    with (directory / name).open("xb") as file:
        stream = _Summed(file, progress)
        for _, data in items:
            start = stream.size
            _write(stream, data)
            places.append(_StorageInfo(name, start, stream.size - start))
        with busy():
            file.flush()
            os.fsync(file.fileno())
    return Written(places, {name: FileSum(stream.size, stream.digest.hexdigest())})


class _Summed:
    """The little of a file that ``torch.save`` needs; knows size and checksum of what went in."""

    def __init__(self, file: BinaryIO, progress: Callable[[], None]) -> None:
        self._file, self._progress = file, progress
        self.size = 0
        self.digest = hashlib.sha256()
        self.trouble: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                self._file.write(piece)
                self.digest.update(piece)
                self._progress()
        except Exception as error:
            self.trouble = error
            raise
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """torch asks for it after every tensor; the file is flushed once, at its end."""


def _write(stream: _Summed, data: torch.Tensor | io.BytesIO) -> None:
    if isinstance(data, io.BytesIO):
        stream.write(data.getbuffer())
        return
    tensor = data.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
        tensor = tensor.clone()  # of a view torch would write all that is behind it
    try:
        torch.save(tensor, stream)  # type: ignore[arg-type]  # it needs write() and flush() only
    except RuntimeError:
        if stream.trouble is None:
            raise
        raise stream.trouble from None  # over which torch complains of an unfinished archive
