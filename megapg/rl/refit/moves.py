"""The plan of a refit: which rank sends which box of which tensor to which rank.

The plan is a function of the slices of all ranks. Every rank computes the same one. It needs only
the standard library.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from megapg.errors import RefitError
from megapg.rl.refit.slices import Slice

Point: TypeAlias = tuple[int, ...]
Box: TypeAlias = tuple[Point, Point]
"""Offset and shape."""


@dataclass(frozen=True)
class Part:
    """A box of a target tensor that is a box of a source tensor.

    If the two tensors have different numbers of axes, they are aligned at the last axis. The first
    axes of a source that has more are fixed by ``source_offset``. Example: row 7 of layer 3 is
    ``Part("decoder.layers.norm.weight", (3, 7), (0,), (1,))``.

    Attributes:
        source: name of the source tensor.
        source_offset: position of the box in the source tensor.
        offset: position of the box in the target tensor.
        shape: shape of the box, with the axes of the target tensor.
    """

    source: str
    source_offset: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


Names: TypeAlias = Mapping[str, str | Sequence[Part]]
"""Name of a target tensor -> name of the source tensor, or the parts that make up the target."""


@dataclass(frozen=True)
class Move:
    """One box that one rank gives to one rank, perhaps itself.

    Attributes:
        name: name of the target tensor.
        sender: rank in the group.
        receiver: rank in the group.
        given: number of the sender's slice.
        given_offset: position of the box in that slice.
        taken: number of the receiver's slice.
        taken_offset: position of the box in that slice.
        shape: shape of the box, with the axes of the target tensor.
        itemsize: bytes of an element.
    """

    name: str
    sender: int
    receiver: int
    given: int
    given_offset: Point
    taken: int
    taken_offset: Point
    shape: Point
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the box."""
        return math.prod(self.shape) * self.itemsize


def find_moves(
    given: Sequence[Sequence[Slice]],
    taken: Sequence[Sequence[Slice]],
    names: Sequence[Names] = (),
    hosts: Sequence[str] = (),
) -> list[Move]:
    """Return the moves that give every element of every target its value, once.

    A receiver that holds the element itself copies it. Otherwise the sender is a rank on the
    receiver's host, if one has the element. Among several the one that has sent least so far sends.

    Args:
        given: the slices that each rank of the group gives.
        taken: the slices that each rank takes.
        names: the names of each rank that takes. A tensor without an entry has the source's name.
        hosts: the host of each rank.

    Raises:
        RefitError: names the tensor, and the range or the difference.
    """
    return _Finder(given, names or [{}] * len(taken), hosts or [""] * len(taken)).moves(taken)


@dataclass
class _Source:
    """A tensor that the ranks give, with the boxes that they hold."""

    first: Slice
    rank: int
    order: int
    holders: dict[Box, dict[int, int]] = field(default_factory=dict)  # box -> rank -> slice
    _index: dict[Point, list[Box]] | None = None
    _covers: dict[Box, tuple[list[tuple[Box, Box]], bool]] = field(default_factory=dict)

    def cover(self, wanted: Box) -> tuple[list[tuple[Box, Box]], bool]:
        """Return (box that ranks hold, its overlap with ``wanted``), and True if these overlaps
        are disjoint and cover all of it.
        """
        if wanted not in self._covers:
            found = [(held, both) for held in self._near(wanted) if (both := overlap(held, wanted))]
            disjoint = sum(volume(both) for _, both in found) == volume(wanted)
            disjoint = disjoint and not _rest(wanted, [both for _, both in found])
            self._covers[wanted] = found, disjoint
        return self._covers[wanted]

    def _near(self, wanted: Box) -> Iterator[Box]:
        """Yield the held boxes that may overlap: those with the same index on the first axes."""
        if self._index is None:
            width = 0  # number of first axes on which every held box has a single index
            while width < len(self.first.shape) and all(
                shape[width] == 1 for _, shape in self.holders
            ):
                width += 1
            self._width = width
            self._index = defaultdict(list)
            for box in self.holders:
                self._index[box[0][:width]].append(box)
        axes = zip(*(each[: self._width] for each in wanted), strict=True)
        for prefix in product(*(range(begin, begin + size) for begin, size in axes)):
            yield from self._index.get(prefix, ())


class _Finder:
    def __init__(
        self, given: Sequence[Sequence[Slice]], names: Sequence[Names], hosts: Sequence[str]
    ) -> None:
        self._names, self._hosts = names, hosts
        self._sources: dict[str, _Source] = {}
        self._load = [0] * len(given)
        self._parts: dict[tuple[int, str, Point, str], tuple[Part, ...]] = {}
        self._same_names = [next(i for i, each in enumerate(names) if each == own) for own in names]
        for rank, slices in enumerate(given):
            for number, each in enumerate(slices):
                source = self._sources.setdefault(
                    each.name, _Source(each, rank, len(self._sources))
                )
                if (each.shape, each.dtype) != (source.first.shape, source.first.dtype):
                    raise RefitError(
                        f"{each.name}: rank {source.rank} of the group gives {_kind(source.first)},"
                        f" and rank {rank} gives {_kind(each)}. Both must be of one model."
                    )
                if math.prod(each.extent):
                    box = (each.offset, each.extent)
                    source.holders.setdefault(box, {}).setdefault(rank, number)

    def moves(self, taken: Sequence[Sequence[Slice]]) -> list[Move]:
        wanted = []
        for rank, slices in enumerate(taken):
            for number, each in enumerate(slices):
                parts = self._parts_of(rank, each)
                # All receivers of a tensor follow each other, so that its senders share the work.
                order = self._sources[parts[0].source].order if parts else -1
                wanted.append((order, each.name, rank, number, each, parts))
        wanted.sort(key=lambda row: row[:4])
        return [
            move
            for _, _, rank, number, each, parts in wanted
            for part in parts
            for move in self._part(rank, number, each, part)
        ]

    def _parts_of(self, rank: int, target: Slice) -> tuple[Part, ...]:
        key = self._same_names[rank], target.name, target.shape, target.dtype
        if key not in self._parts:
            named = self._names[rank].get(target.name, target.name)
            if isinstance(named, str):
                found = self._same_tensor(rank, target, named)
            else:
                found = tuple(named)
                self._check_parts(rank, target, found)
            self._parts[key] = tuple(part for part in found if math.prod(part.shape))
        return self._parts[key]

    def _same_tensor(self, rank: int, target: Slice, named: str) -> tuple[Part, ...]:
        source = self._source(rank, target, named)
        shape = target.shape
        if source.shape != shape:
            if not (source.resizable and target.resizable and len(source.shape) == len(shape)):
                raise RefitError(
                    f"{_both(target, named)}: rank {rank} of the group takes shape {list(shape)}, "
                    f"and the source has {list(source.shape)}. Name the parts of the source in "
                    "names."
                )
            shape = source.shape  # the rest of the target is padding
        zeros = (0,) * len(shape)
        return (Part(named, zeros, zeros, shape),)

    def _check_parts(self, rank: int, target: Slice, parts: Sequence[Part]) -> None:
        whole = ((0,) * len(target.shape), target.shape)
        for part in parts:
            source = self._source(rank, target, part.source)
            fits = len(part.shape) == len(part.offset) == len(target.shape)
            fits = fits and len(part.source_offset) == len(source.shape)
            fits = fits and overlap((part.offset, part.shape), whole) == (part.offset, part.shape)
            if fits:
                box = (part.source_offset, _aligned(part.shape, len(source.shape), 1))
                fits = overlap(box, ((0,) * len(source.shape), source.shape)) == box
                fits = fits and math.prod(box[1]) == math.prod(part.shape)
            if not fits:
                raise RefitError(
                    f"{_both(target, part.source)}: {part} does not lie inside the target of shape "
                    f"{list(target.shape)} and the source of shape {list(source.shape)}."
                )
        boxes = [(part.offset, part.shape) for part in parts]
        if left := _rest(whole, boxes):
            raise RefitError(f"{target.name}{_range(left[0])}: no part of names fills this range.")
        if sum(map(volume, boxes)) != volume(whole):
            twice = next(
                both
                for number, box in enumerate(boxes)
                for other in boxes[:number]
                if (both := overlap(box, other))
            )
            raise RefitError(f"{target.name}{_range(twice)}: two parts of names fill this range.")

    def _source(self, rank: int, target: Slice, named: str) -> Slice:
        if named not in self._sources:
            raise RefitError(
                f"{_both(target, named)}: rank {rank} of the group takes it, and no rank gives it. "
                "Name its source in names."
            )
        source = self._sources[named].first
        if source.dtype != target.dtype:
            raise RefitError(
                f"{_both(target, named)}: rank {rank} of the group takes {target.dtype}, and the "
                f"source has {source.dtype}. Give both models the same type."
            )
        return source

    def _part(self, rank: int, number: int, target: Slice, part: Part) -> Iterator[Move]:
        wanted = overlap((target.offset, target.extent), (part.offset, part.shape))
        if wanted is None:
            return
        source = self._sources[part.source]
        axes = len(part.source_offset)
        inside = tuple(a - b for a, b in zip(wanted[0], part.offset, strict=True))
        begin = tuple(
            a + b for a, b in zip(part.source_offset, _aligned(inside, axes, 0), strict=True)
        )
        box = (begin, _aligned(wanted[1], axes, 1))
        found, disjoint = source.cover(box)
        if not disjoint:
            found = _disjoint(rank, source, box, found, target)
        for held, piece in found:
            holders = source.holders[held]
            sender = self._sender(rank, holders, volume(piece) * target.itemsize)
            # From the source's axes to those of the target, and relative to the slices.
            at = tuple(a - b for a, b in zip(piece[0], begin, strict=True))
            at = tuple(
                a + b - c
                for a, b, c in zip(
                    _aligned(at, len(target.shape), 0), wanted[0], target.offset, strict=True
                )
            )
            yield Move(
                target.name,
                sender,
                rank,
                holders[sender],
                tuple(a - b for a, b in zip(piece[0], held[0], strict=True)),
                number,
                at,
                _aligned(piece[1], len(target.shape), 1),
                target.itemsize,
            )

    def _sender(self, receiver: int, holders: Mapping[int, int], size: int) -> int:
        if receiver in holders:
            return receiver
        near = [rank for rank in holders if self._hosts[rank] == self._hosts[receiver]]
        sender = min(near or holders, key=lambda rank: (self._load[rank], rank))
        self._load[sender] += size
        return sender


def _disjoint(
    rank: int, source: _Source, wanted: Box, found: Sequence[tuple[Box, Box]], target: Slice
) -> list[tuple[Box, Box]]:
    """Return disjoint pieces that cover ``wanted``, first from the boxes that ``rank`` holds."""
    left, pieces = [wanted], list[tuple[Box, Box]]()
    for held, both in sorted(found, key=lambda pair: rank not in source.holders[pair[0]]):
        pieces += [(held, piece) for each in left if (piece := overlap(each, both))]
        left = [rest for each in left for rest in _without(each, both)]
    if left:
        raise RefitError(
            f"{_both(target, source.first.name)}: no rank gives {source.first.name}"
            f"{_range(left[0])}, which rank {rank} of the group takes."
        )
    return pieces


# --- boxes ----------------------------------------------------------------------------------------


def volume(box: Box) -> int:
    """Return the number of elements."""
    return math.prod(box[1])


def overlap(one: Box, other: Box) -> Box | None:
    """Return the elements in both boxes; None if there are none."""
    offset, shape = [], []
    for a, n, b, m in zip(*one, *other, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        offset.append(begin)
        shape.append(end - begin)
    return tuple(offset), tuple(shape)


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Yield disjoint boxes of the elements of ``box`` that are not in ``hole``."""
    both = overlap(box, hole)
    if both is None:
        yield box
        return
    offset, shape = list(box[0]), list(box[1])
    for axis, (begin, size) in enumerate(zip(*both, strict=True)):
        for start, end in (
            (offset[axis], begin),
            (begin + size, offset[axis] + shape[axis]),
        ):
            if start < end:
                yield (
                    (*offset[:axis], start, *offset[axis + 1 :]),
                    (*shape[:axis], end - start, *shape[axis + 1 :]),
                )
        offset[axis], shape[axis] = begin, size


def _rest(whole: Box, boxes: Sequence[Box]) -> list[Box]:
    """Return disjoint boxes of the elements of ``whole`` that are in none of ``boxes``."""
    left = [whole] if volume(whole) else []
    for box in boxes:
        left = [rest for each in left for rest in _without(each, box)]
    return left


def _aligned(point: Point, axes: int, fill: int) -> Point:
    """Return the point with ``axes`` axes: first ones are added or dropped."""
    return (fill,) * (axes - len(point)) + point[max(len(point) - axes, 0) :]


# --- messages -------------------------------------------------------------------------------------


def _both(target: Slice, source: str) -> str:
    return target.name if target.name == source else f"{target.name} (from {source})"


def _kind(described: Slice) -> str:
    return f"{described.dtype} of shape {list(described.shape)}"


def _range(box: Box) -> str:
    return f"[{', '.join(f'{begin}:{begin + size}' for begin, size in zip(*box, strict=True))}]"
