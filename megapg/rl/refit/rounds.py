"""The moves of a refit in rounds, so that the buffers of a round fit into a limit.

Every rank computes the same rounds. In a round, a rank posts all its receives and sends before it
waits for one. So the ranks can't deadlock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megapg.rl.refit.moves import Move

_ALIGNED = 16  # bytes of the largest element
_PIECES = 4  # A box of more than a quarter of the limit is cut, so that rounds get full.


def rounds_of(moves: Iterable[Move], limit: int) -> list[list[Move]]:
    """Return the moves between ranks, cut and in rounds.

    In each round, the bytes that a rank sends and receives together are at most ``limit``. A move
    goes into the first round with room on both of its ranks.
    """
    rounds: list[list[Move]] = []
    used: dict[int, list[int]] = defaultdict(list)  # rank -> bytes in each round
    first: dict[int, int] = defaultdict(int)  # rank -> its first round that is not almost full
    full = limit - limit // 64
    for move in moves:
        if move.sender == move.receiver:
            continue
        ends = move.sender, move.receiver
        for chunk in _cut(move, max(limit // _PIECES, move.itemsize)):
            size = padded(chunk)
            at = max(first[rank] for rank in ends)
            while any(_used(used[rank], at) + size > limit for rank in ends):
                at += 1
            while len(rounds) <= at:
                rounds.append([])
            rounds[at].append(chunk)
            for rank in ends:
                row = used[rank]
                row += [0] * (at + 1 - len(row))
                row[at] += size
                while first[rank] < len(row) and row[first[rank]] >= full:
                    first[rank] += 1
    return rounds


def padded(move: Move) -> int:
    """Return the bytes of the box, rounded up so that the next one is aligned."""
    return -(-move.nbytes // _ALIGNED) * _ALIGNED


def _used(row: Sequence[int], at: int) -> int:
    return row[at] if at < len(row) else 0


def _cut(move: Move, limit: int) -> Iterator[Move]:
    """Yield the move in boxes of at most ``limit`` bytes."""
    if move.nbytes <= limit:
        yield move
        return
    axis = next(axis for axis, size in enumerate(move.shape) if size > 1)
    row = math.prod(move.shape[axis + 1 :]) * move.itemsize
    step = max(limit // row, 1)
    for begin in range(0, move.shape[axis], step):
        size = min(step, move.shape[axis] - begin)
        yield from _cut(
            replace(
                move,
                shape=(*move.shape[:axis], size, *move.shape[axis + 1 :]),
                given_offset=_moved(move.given_offset, axis - len(move.shape), begin),
                taken_offset=_moved(move.taken_offset, axis - len(move.shape), begin),
            ),
            limit,
        )


def _moved(offset: tuple[int, ...], axis: int, by: int) -> tuple[int, ...]:
    """Return the offset with ``by`` added on an axis, which is counted from the last."""
    at = len(offset) + axis
    return (*offset[:at], offset[at] + by, *offset[at + 1 :])
