"""Carries out the plan of a refit over a process group."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megapg import torch_private
from megapg.collection import ProcessGroup
from megapg.errors import RefitError
from megapg.rl.refit.moves import Move, Names, Part, find_moves
from megapg.rl.refit.rounds import padded, rounds_of
from megapg.rl.refit.slices import Slices

_ALONE = 64 << 10
"""Bytes of a box from which it is a message of its own, without a copy if it is contiguous."""

_MADE = '{"problem": '
"""The beginning of the message of a rank that makes a Refit."""


@dataclass(frozen=True)
class RefitReport:
    """The result of one run on this rank.

    Attributes:
        sent: bytes sent to other ranks.
        received: bytes received from other ranks.
        copied: bytes copied from this rank's own source.
        rounds: number of rounds in which this rank sent or received.
        buffer: the most bytes of buffers at one time.
        seconds: wall time.
    """

    sent: int
    received: int
    copied: int
    rounds: int
    buffer: int
    seconds: float


class Refit:
    """Moves weights from the ranks that give them to the ranks that take them. ::

        refit = megapg.Refit(group, gives=megapg.slices_of(model, pg_collection=pg))  # trainer
        refit = megapg.Refit(group, takes=megapg.slices_of(model))  # rollout
        ...
        report = refit.run()  # after each step, on every rank of the group

    The constructor exchanges the slices of all ranks. Then each rank makes the same plan.
    :meth:`run` writes the values of the source into the live tensors of the target, bit for bit.
    Each element that a rank does not hold itself reaches it once. A rank may give and take.

    If a model is built anew, make a new object on every rank. An object is not thread-safe.

    Args:
        group: a group of all ranks that give or take, such as that of a joint group. Every rank of
            the group makes the object and runs it.
        gives: the slices of the source that this rank holds; None: none.
        takes: the slices of the target that this rank holds; None: none.
        names: name of a target tensor -> name of the source tensor, or the :class:`Part` objects
            that make up the target. A tensor without an entry has the same name in both.
        bucket_bytes: the most memory of a rank for buffers during :meth:`run`, the same on all
            ranks.

    Raises:
        RefitError: on every rank: a target is not given, or only in part; shapes or types differ;
            a rank gave wrong arguments. On the ranks that wait: a rank does not come within the
            timeout of the group.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        gives: Slices | None = None,
        takes: Slices | None = None,
        names: Names | None = None,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise RefitError(
                f"Refit(): group is {group!r}; pass a process group that this rank is in."
            )
        self._group, self._gives, self._takes = group, gives, takes
        self._rank, self._size = group.rank(), group.size()
        self._broken = ""
        self._kinds = [device.type for device in torch_private.devices_of(group)]
        told = self._told(names, bucket_bytes)
        with self._waiting("exchanging the slices"):
            everyone = [
                _heard(rank, each)
                for rank, each in enumerate(self._everyone(told, self._first_device()))
            ]
        _check(everyone)
        given, taken = (
            [Slices.from_json(each[side]).described for each in everyone]
            for side in ("gives", "takes")
        )
        if not any(given) or not any(taken):
            side, verb = ("takes", "take") if any(given) else ("gives", "give")
            raise RefitError(f"no rank of the group has {side}=; some must {verb} weights.")
        self._device = self._buffers_on(everyone)
        moves = find_moves(
            given,
            taken,
            [_names_from(each["names"]) for each in everyone],
            [each["host"] for each in everyone],
        )
        self._copies = [move for move in moves if move.sender == move.receiver == self._rank]
        mine = (
            [move for move in each if self._rank in (move.sender, move.receiver)]
            for each in rounds_of(moves, bucket_bytes)
        )
        self._rounds = [each for each in mine if each]
        self._largest = max((sum(map(padded, each)) for each in self._rounds), default=0)
        used = [*self._copies, *(move for each in self._rounds for move in each)]
        self._given = sorted({move.given for move in used if move.sender == self._rank})
        self._taken = sorted({move.taken for move in used if move.receiver == self._rank})

    def run(self) -> RefitReport:
        """Move the weights. Every rank of the group calls it.

        Returns:
            The bytes that this rank sent, received and copied.

        Raises:
            RefitError: on every rank, before any weight changes: a tensor of a rank has another
                shape or type than before. On the ranks that wait: a rank failed, or did not come
                within the timeout of the group. Then targets may hold a mixture, and the object
                can't be used again.
        """
        if self._broken:
            raise RefitError(f"this Refit failed before: {self._broken} Make a new one.")
        started = time.monotonic()
        problem = ""
        source, target = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        try:
            if self._gives is not None and self._gives.prepare is not None:
                self._gives.prepare()
            source = self._live(self._gives, self._given)
            target = self._live(self._takes, self._taken)
        except Exception as error:  # raised on every rank below
            problem = str(error) if isinstance(error, RefitError) else repr(error)
        with self._waiting("waiting for all ranks to start a refit"):
            problems = self._everyone(problem, self._device)
        made = (
            "it makes a new Refit meanwhile. Run this one on every rank, or make one on every rank."
        )
        _raise_first([made if each.startswith(_MADE) else each for each in problems])
        buffer = _Buffer(self._largest, self._device)
        with self._waiting("moving weights"), torch.no_grad():
            for move in self._copies:
                box = _box(target[move.taken], move.taken_offset, move.shape)
                box.copy_(_source_box(source[move.given], move))
            for moves in self._rounds:
                self._round(moves, source, target, buffer)
            if (device := self._device).type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        moved = [move for moves in self._rounds for move in moves]
        return RefitReport(
            sent=sum(move.nbytes for move in moved if move.sender == self._rank),
            received=sum(move.nbytes for move in moved if move.receiver == self._rank),
            copied=sum(move.nbytes for move in self._copies),
            rounds=len(self._rounds),
            buffer=buffer.used,
            seconds=time.monotonic() - started,
        )

    def _round(
        self,
        moves: Sequence[Move],
        source: dict[int, torch.Tensor],
        target: dict[int, torch.Tensor],
        buffer: _Buffer,
    ) -> None:
        """Move the boxes of a round."""
        operations, arriving = list[dist.P2POp](), list[Callable[[], None]]()
        buffer.clear()
        for message in _messages(moves):
            sends = message[0].sender == self._rank
            boxes = [
                _source_box(source[move.given], move)
                if sends
                else _box(target[move.taken], move.taken_offset, move.shape)
                for move in message
            ]
            content = self._as_bytes(boxes)
            if content is None:
                content = buffer.take(message)
                if sends:
                    _pack(boxes, content)
                else:
                    arriving.append(partial(_unpack, content, boxes))
            call, peer = (
                (dist.isend, message[0].receiver) if sends else (dist.irecv, message[0].sender)
            )
            operations.append(dist.P2POp(call, content, group=self._group, group_peer=peer))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for unpack in arriving:
            unpack()

    def _as_bytes(self, boxes: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the memory of a single box, if it needs no buffer."""
        if len(boxes) > 1 or boxes[0].device != self._device or not boxes[0].is_contiguous():
            return None
        return boxes[0].reshape(-1).view(torch.uint8)

    # -- the beginning -----------------------------------------------------------------------------

    def _told(self, names: Names | None, bucket_bytes: int) -> str:
        """Return the message of this rank to all others."""
        problem = ""
        sides: tuple[tuple[str, Any], ...] = (("gives", self._gives), ("takes", self._takes))
        for argument, slices in sides:
            if slices is not None and not isinstance(slices, Slices):
                problem = (
                    f"{argument} is a {type(slices).__name__}; pass the result of slices_of()."
                )
            elif slices is not None and len(slices.live) != len(slices.described):
                problem = f"{argument} has no tensors; pass the result of slices_of()."
        if not isinstance(bucket_bytes, int) or bucket_bytes < 64:
            problem = f"bucket_bytes={bucket_bytes!r}; give a number of bytes, at least 64."
        if problem:
            return json.dumps({"problem": problem})
        held = [each for each in (self._gives, self._takes) if each is not None]
        return json.dumps(
            {
                "problem": "",
                "gives": (self._gives or Slices(())).to_json(),
                "takes": (self._takes or Slices(())).to_json(),
                "names": {
                    target: named if isinstance(named, str) else list(map(_row, named))
                    for target, named in (names or {}).items()
                },
                "bucket_bytes": bucket_bytes,
                "host": socket.gethostname(),
                "devices": sorted({view().device.type for each in held for view in each.live}),
            }
        )

    def _first_device(self) -> torch.device:
        return self._device_of("cpu" if "cpu" in self._kinds else self._kinds[0])

    def _buffers_on(self, everyone: Sequence[dict[str, Any]]) -> torch.device:
        """Return the device of all buffers: that of the tensors, if the group can send from it."""
        kinds = {kind for each in everyone for kind in each["devices"]}
        if len(kinds) == 1 and (kind := kinds.pop()) in self._kinds:
            return self._device_of(kind)
        return self._first_device()

    def _device_of(self, kind: str) -> torch.device:
        return (
            torch.device(kind, torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )

    def _live(self, slices: Slices | None, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the tensors of the slices, which must be as they were described."""
        found = dict[int, torch.Tensor]()
        if slices is None:
            return found
        for number in numbers:
            described = slices.described[number]
            tensor = found[number] = slices.live[number]()
            if tuple(tensor.shape) != described.extent or str(tensor.dtype) != (
                f"torch.{described.dtype}"
            ):
                raise RefitError(
                    f"{described.parameter or described.name} was {described.dtype} of shape "
                    f"{list(described.extent)}, and is {tensor.dtype} of shape "
                    f"{list(tensor.shape)}. Call slices_of() again, and make a new Refit."
                )
        return found

    def _everyone(self, text: str, device: torch.device) -> list[str]:
        """Return the text of every rank. Empty texts cost one small collective."""
        data = text.encode()
        size = torch.tensor([len(data)], dtype=torch.int64, device=device)
        sizes = [torch.empty_like(size) for _ in range(self._size)]
        dist.all_gather(sizes, size, group=self._group)
        lengths = [int(each) for each in sizes]
        if not any(lengths):
            return [""] * self._size
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        mine[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ].to(device)
        texts = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(texts, mine, group=self._group)
        return [
            each[:length].cpu().numpy().tobytes().decode(errors="replace")
            for each, length in zip(texts, lengths, strict=True)
        ]

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Turn an error of torch into one that says what failed, and end the use of this object."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{what}: {type(error).__name__}."
            if not isinstance(error, RuntimeError) or isinstance(error, RefitError):
                raise
            raise RefitError(
                f"refit on rank {self._rank} of {self._size}: {what} failed. Another rank died, "
                f"failed, or did not come within the timeout of the group: "
                f"{str(error).strip().partition(chr(10))[0]}"
            ) from error


class _Buffer:
    """The memory for the boxes of a round that are not sent from their tensors."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._memory: torch.Tensor | None = None
        self._taken = 0
        self.used = 0  # the most bytes at one time

    def clear(self) -> None:
        self._taken = 0

    def take(self, message: Sequence[Move]) -> torch.Tensor:
        """Return the memory for a message. It is aligned to elements of any type."""
        if self._memory is None:
            self._memory = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        begin = self._taken
        self._taken += sum(map(padded, message))
        self.used = max(self.used, self._taken)
        return self._memory[begin : begin + sum(move.nbytes for move in message)]


def _check(everyone: Sequence[dict[str, Any]]) -> None:
    _raise_first([each["problem"] for each in everyone])
    for rank, each in enumerate(everyone):
        if each["bucket_bytes"] != everyone[0]["bucket_bytes"]:
            raise RefitError(
                f"bucket_bytes is {everyone[0]['bucket_bytes']} on rank 0 of the group and "
                f"{each['bucket_bytes']} on rank {rank}. Give all ranks the same."
            )


def _raise_first(problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise RefitError(f"rank {rank} of the group: {problem}")


def _heard(rank: int, text: str) -> dict[str, Any]:
    """Return the message of a rank that makes this object."""
    try:
        message: dict[str, Any] = json.loads(text)
    except ValueError:
        raise RefitError(
            f"rank {rank} of the group does not make a Refit now, but runs one, or another "
            "collective. Make it on every rank, and use the group for nothing else meanwhile."
        ) from None
    return message


def _row(part: Part) -> list[object]:
    return [*dataclasses.astuple(part)]


def _names_from(rows: dict[str, Any]) -> dict[str, str | list[Part]]:
    return {
        target: named
        if isinstance(named, str)
        else [Part(source, *map(tuple, numbers)) for source, *numbers in named]
        for target, named in rows.items()
    }


def _box(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    return tensor[
        tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))
    ]


def _source_box(tensor: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the box of a move in a source, with the axes of the target."""
    more = tensor.dim() - len(move.shape)
    shape = (1,) * more + move.shape[max(-more, 0) :]
    box = _box(tensor, move.given_offset, shape)
    return box[(0,) * more] if more > 0 else box[(None,) * -more]


def _messages(moves: Sequence[Move]) -> list[list[Move]]:
    """Return the moves of each message, in the same order on both of its ranks."""
    alone = [[move] for move in moves if move.nbytes >= _ALONE]
    together: dict[tuple[int, int], list[Move]] = defaultdict(list)
    # Large elements come first in a buffer, so that each box is aligned to its elements.
    for move in sorted(moves, key=lambda move: -move.itemsize):
        if move.nbytes < _ALONE:
            together[move.sender, move.receiver].append(move)
    return [*together.values(), *alone]


def _pack(boxes: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    for box, piece in zip(boxes, _pieces(buffer, boxes), strict=True):
        piece.copy_(box)


def _unpack(buffer: torch.Tensor, boxes: Sequence[torch.Tensor]) -> None:
    for box, piece in zip(boxes, _pieces(buffer, boxes), strict=True):
        box.copy_(piece)


def _pieces(buffer: torch.Tensor, boxes: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the part of the buffer of each box, as a tensor of its shape."""
    at = 0
    for box in boxes:
        yield buffer[at : at + box.nbytes].view(box.dtype).view(box.shape)
        at += box.nbytes
