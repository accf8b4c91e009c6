"""Carries out the plan of a refit over a process group."""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megapg import torch_private
from megapg.collection import ProcessGroup
from megapg.errors import RefitError
from megapg.refit.moves import Move, Names, Part, plan_moves
from megapg.refit.rounds import rounds_of
from megapg.refit.slices import Slices


@dataclass(frozen=True)
class RefitReport:
    """What one run moved on this rank.

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

    The constructor exchanges the slices of all ranks, and each rank plans alone. :meth:`run` writes
    the values of the source into the live tensors of the target, bit for bit. Each element that a
    rank does not hold itself reaches it once. A rank may give and take.

    If a model is built anew, make a new object on every rank. An object is not thread-safe.

    Args:
        group: a group of all ranks that give or take, such as that of a joint group. Every rank of
            the group makes the object and runs it.
        gives: the slices of the source that this rank holds; None: none.
        takes: the slices of the target that this rank holds; None: none.
        names: for a target with other names: name of the target tensor -> name of the source
            tensor, or the :class:`Part` objects that make up the target. A tensor without an entry
            has the same name in both.
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
            everyone = [json.loads(each) for each in self._everyone(told, self._first_device())]
        self._check(everyone)
        self._device = self._buffers_on(everyone)
        moves = plan_moves(
            [Slices.from_json(each["gives"]).described for each in everyone],
            [Slices.from_json(each["takes"]).described for each in everyone],
            [_names_from(each["names"]) for each in everyone],
            [each["host"] for each in everyone],
        )
        self._copies = [move for move in moves if move.sender == move.receiver == self._rank]
        mine = (
            [move for move in each if self._rank in (move.sender, move.receiver)]
            for each in rounds_of(moves, bucket_bytes)
        )
        self._rounds = [each for each in mine if each]
        used = [*self._copies, *(move for each in self._rounds for move in each)]
        self._given = sorted({move.given for move in used if move.sender == self._rank})
        self._taken = sorted({move.taken for move in used if move.receiver == self._rank})

    def run(self) -> RefitReport:
        """Move the weights. Every rank of the group calls it.

        Returns:
            What this rank sent, received and copied.

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
        _raise_first(problems)
        sent = received = buffer = 0
        with self._waiting("moving weights"), torch.no_grad():
            for move in self._copies:
                box = _box(target[move.taken], move.taken_offset, move.shape)
                box.copy_(_box_of_source(source[move.given], move).view(move.shape))
            for moves in self._rounds:
                outgoing, incoming = self._round(moves, source, target)
                sent, received = sent + outgoing, received + incoming
                buffer = max(buffer, outgoing + incoming)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        copied = sum(move.nbytes for move in self._copies)
        seconds = time.monotonic() - started
        return RefitReport(sent, received, copied, len(self._rounds), buffer, seconds)

    def _round(
        self,
        moves: Sequence[Move],
        source: dict[int, torch.Tensor],
        target: dict[int, torch.Tensor],
    ) -> tuple[int, int]:
        outgoing: dict[int, list[Move]] = defaultdict(list)
        incoming: dict[int, list[Move]] = defaultdict(list)
        # Large elements come first in a buffer, so that each box is aligned to its elements.
        for move in sorted(moves, key=lambda move: -move.itemsize):
            if move.sender == self._rank:
                outgoing[move.receiver].append(move)
            else:
                incoming[move.sender].append(move)
        received = {peer: self._buffer(each) for peer, each in incoming.items()}
        sent = {peer: self._buffer(each) for peer, each in outgoing.items()}
        for peer, each in outgoing.items():
            for move, piece in self._pieces(sent[peer], each, source):
                piece.copy_(_box_of_source(source[move.given], move).view(move.shape))
        works = dist.batch_isend_irecv(
            [self._operation(dist.irecv, *pair) for pair in received.items()]
            + [self._operation(dist.isend, *pair) for pair in sent.items()]
        )
        for work in works:
            work.wait()
        for peer, each in incoming.items():
            for move, piece in self._pieces(received[peer], each, target):
                _box(target[move.taken], move.taken_offset, move.shape).copy_(piece)
        return _bytes(sent.values()), _bytes(received.values())

    def _buffer(self, moves: Sequence[Move]) -> torch.Tensor:
        size = sum(move.nbytes for move in moves)
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _pieces(
        self, buffer: torch.Tensor, moves: Sequence[Move], tensors: dict[int, torch.Tensor]
    ) -> Iterator[tuple[Move, torch.Tensor]]:
        """Yield each move with its part of the buffer, as a tensor of its shape."""
        at = 0
        for move in moves:
            dtype = tensors[move.given if move.sender == self._rank else move.taken].dtype
            yield move, buffer[at : at + move.nbytes].view(dtype).view(move.shape)
            at += move.nbytes

    def _operation(self, call: Callable[..., Any], peer: int, buffer: torch.Tensor) -> dist.P2POp:
        return dist.P2POp(call, buffer, group=self._group, group_peer=peer)

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

    def _check(self, everyone: Sequence[dict[str, Any]]) -> None:
        _raise_first([each["problem"] for each in everyone])
        for rank, each in enumerate(everyone):
            if each["bucket_bytes"] != everyone[0]["bucket_bytes"]:
                raise RefitError(
                    f"bucket_bytes is {everyone[0]['bucket_bytes']} on rank 0 of the group and "
                    f"{each['bucket_bytes']} on rank {rank}. Give all ranks the same."
                )
        for side, verb in (("gives", "give weights"), ("takes", "take weights")):
            if not any(Slices.from_json(each[side]).described for each in everyone):
                raise RefitError(f"no rank of the group has {side}=; some must {verb}.")

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
            bytes(each[:length].cpu().tolist()).decode()
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


def _raise_first(problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise RefitError(f"rank {rank} of the group: {problem}")


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


def _box_of_source(tensor: torch.Tensor, move: Move) -> torch.Tensor:
    """Return the box of a move in a source, with the axes of the target."""
    more = tensor.dim() - len(move.shape)
    shape = (1,) * more + move.shape[max(-more, 0) :]
    box = _box(tensor, move.given_offset, shape)
    return box[(0,) * more] if more > 0 else box[(None,) * -more]


def _bytes(buffers: Any) -> int:
    return sum(math.prod(each.shape) for each in buffers)
