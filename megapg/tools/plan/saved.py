"""The memory that autograd keeps for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def storages(tensors: Iterable[torch.Tensor], without: Iterable[int] = ()) -> dict[int, int]:
    """Return the bytes of each storage of the tensors, by a number of the storage.

    The number is valid as long as the storage exists.
    """
    found = {_number(each): each.untyped_storage().nbytes() for each in tensors}
    for number in without:
        found.pop(number, None)
    return found


def _number(tensor: torch.Tensor) -> int:
    weak = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return int(weak.cdata)


class Saved:
    """The storages that autograd keeps, each counted once.

    Attributes:
        bytes: their bytes now.
        most: the most so far.
    """

    def __init__(self, excluded: Iterable[int]) -> None:
        self.bytes = self.most = 0
        self._excluded = frozenset(excluded)
        self._uses: dict[int, int] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Count what autograd saves in the block, also while it computes activations again."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> _Kept | torch.Tensor:
        return tensor if _number(tensor) in self._excluded else _Kept(self, tensor)

    def change(self, tensor: torch.Tensor, by: int) -> None:
        """Note one use more or less of a tensor's storage."""
        number = _number(tensor)
        before = self._uses.pop(number, 0)
        if before + by:
            self._uses[number] = before + by
        if not before or not before + by:
            self.bytes += by * tensor.untyped_storage().nbytes()
            self.most = max(self.most, self.bytes)


class _Kept:
    """A tensor that a node of the graph keeps. Autograd drops this object with the node."""

    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.change(tensor, 1)

    def __del__(self) -> None:
        self.saved.change(self.tensor, -1)


def _unpack(kept: Any) -> torch.Tensor:
    tensor: torch.Tensor = kept.tensor if isinstance(kept, _Kept) else kept
    return tensor
