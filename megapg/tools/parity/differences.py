"""Compare the tensors of a layout's ranks with those of one rank."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from megapg.tools.parity.comparison import Shard

Box: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]  # key, offset, shape


@dataclass(frozen=True)
class Piece:
    """A part of a parameter on one rank, and the values of the reference there."""

    rank: int
    box: Box
    value: torch.Tensor
    wanted: torch.Tensor


@dataclass(frozen=True)
class Compared:
    """One parameter on all ranks.

    Attributes:
        name: in the model of one rank.
        expert: True if it belongs to an expert.
        pieces: its parts on the ranks.
        missing: number of elements that no rank holds.
        off: largest difference, as a share of ``scale``.
        scale: size of a difference that counts as 1.
    """

    name: str
    expert: bool
    pieces: Sequence[Piece]
    missing: int
    off: float
    scale: float

    def wrong(self, tolerance: float) -> tuple[int, ...]:
        """The ranks whose values are off."""
        ranks = {
            p.rank for p in self.pieces if largest(p.value - p.wanted) > tolerance * self.scale
        }
        return tuple(sorted(ranks))


class Reference:
    """The tensors of one rank, by their place in a checkpoint."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self._by_key: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            self._by_key[shard.key].append(shard)

    def find(self, shard: Shard) -> tuple[Shard, torch.Tensor] | None:
        """Return the shard that contains this part, and its values there.

        A part that reaches into padding is cut.
        """
        for whole in self._by_key.get(shard.key, ()):
            begin = [a - b for a, b in zip(shard.offset, whole.offset, strict=True)]
            sizes = zip(begin, shard.data.shape, whole.data.shape, strict=True)
            ends = [
                min(first + size, limit) if shard.resizable else first + size
                for first, size, limit in sizes
            ]
            limits = zip(begin, ends, whole.data.shape, strict=True)
            if all(0 <= first < end <= limit for first, end, limit in limits):
                cut = tuple(slice(*each) for each in zip(begin, ends, strict=True))
                return whole, whole.data[cut]
        return None

    def name_of(self, shard: Shard) -> str | None:
        """Return the name of the shard's parameter in the model of one rank."""
        found = self.find(shard)
        return found[0].name if found else None


def line_up(
    reference: Reference,
    ranks: Sequence[Sequence[Shard]],
    start: Reference | None = None,
    share_of_largest: float = 1e-3,
) -> list[Compared]:
    """Return every parameter of the reference with its pieces, in the reference's order.

    A difference is measured by the parameter's largest value (with ``start``, by its largest
    change since then), and at least by a share of the largest of all.
    """
    pieces: dict[str, list[Piece]] = {shard.name: [] for shard in reference.shards}
    for rank, shards in enumerate(ranks):
        for shard in shards:
            found = reference.find(shard)
            if found is None:
                continue
            whole, wanted = found
            box = (shard.key, shard.offset, tuple(wanted.shape))
            value = shard.data[tuple(slice(size) for size in wanted.shape)]
            pieces[whole.name].append(Piece(rank, box, value, wanted))
    scales = _scales(reference, start)
    floor = share_of_largest * max(scales.values(), default=0.0) or 1.0
    sizes: dict[str, int] = defaultdict(int)
    expert = {shard.name: shard.expert for shard in reference.shards}
    for shard in reference.shards:
        sizes[shard.name] += shard.data.numel()
    compared = []
    for name, found_ in pieces.items():
        scale = max(scales[name], floor)
        held = sum(math.prod(shape) for _, _, shape in {piece.box for piece in found_})
        off = max((largest(p.value - p.wanted) for p in found_), default=0.0) / scale
        compared.append(Compared(name, expert[name], found_, sizes[name] - held, off, scale))
    return compared


def _scales(reference: Reference, start: Reference | None) -> Mapping[str, float]:
    scales: dict[str, float] = defaultdict(float)
    for shard in reference.shards:
        before = start.find(shard) if start is not None else None
        change = shard.data - before[1] if before else shard.data
        scales[shard.name] = max(scales[shard.name], largest(change))
    return scales


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value. NaN counts as infinite."""
    value = float(tensor.abs().max()) if tensor.numel() else 0.0
    return math.inf if math.isnan(value) else value


def unlike(ranks: Sequence[Sequence[Shard]], tolerance: float) -> Iterator[list[tuple[int, Shard]]]:
    """Yield each part of a tensor that several ranks hold with different values."""
    boxes: dict[Box, list[tuple[int, Shard]]] = defaultdict(list)
    for rank, shards in enumerate(ranks):
        for shard in shards:
            boxes[shard.key, shard.offset, tuple(shard.data.shape)].append((rank, shard))
    for holders in boxes.values():
        first = holders[0][1].data
        scale = largest(first) or 1.0
        if any(largest(shard.data - first) > tolerance * scale for _, shard in holders[1:]):
            yield holders


def closest_part(output: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """Return the part of the reference's output that is closest to a rank's output."""
    parts = [*_parts(whole, output.shape)]
    return min(parts, key=lambda part: largest(output - part), default=None)


def _parts(whole: torch.Tensor, shape: torch.Size) -> Iterator[torch.Tensor]:
    """Yield the even parts of a tensor that have this shape, and the parts of its halves."""
    if whole.dim() != len(shape):
        return
    cut = [axis for axis, size in enumerate(shape) if size != whole.shape[axis]]
    if not cut:
        yield whole
        return
    axis = cut[0]
    if not shape[axis] or whole.shape[axis] % shape[axis]:
        return
    count = whole.shape[axis] // shape[axis]
    for piece in whole.chunk(count, axis):
        yield from _parts(piece, shape)
    if shape[axis] % 2 == 0:  # a gated layer, and a sequence cut for context parallelism
        pieces = whole.chunk(2 * count, axis)
        for first in range(count):
            for second in (first + count, 2 * count - 1 - first):
                yield from _parts(torch.cat((pieces[first], pieces[second]), axis), shape)
