"""Messages that ranks put into a folder of the store for their leader, which may be long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megapg.rendezvous.blocks import Blocks, Reports, report_key
from megapg.rendezvous.store import Store, batches

# TCPStore refuses values of 8 MiB and more. Bytes.
_PIECE = 4 * 2**20
# Up to which size a message is one value, so that the leader takes those of many ranks at once.
_SMALL = 2**16
# Of a message in a report: how many bytes say how long it is.
_LENGTH = 8


class Topic:
    """What these ranks say, as far as it has been heard.

    Attributes:
        arrived: rank -> its message.
        waiting: those that have said nothing yet.
    """

    def __init__(self, store: Store, folder: str, ranks: Sequence[int]) -> None:
        self._store, self._folder, self._ranks = store, folder, ranks
        self.arrived: dict[int, bytes] = {}
        self.waiting = list(ranks)

    def all_here(self) -> bool:
        """Whether all have been heard."""
        for some in batches(self.waiting):
            found = _first_of(self._store, [f"{self._folder}/{rank}" for rank in some])
            self.arrived.update(zip(some, found, strict=False))
            if len(found) < len(some):
                break  # asked again soon; the others meanwhile say nothing new
        self.waiting = [rank for rank in self.waiting if rank not in self.arrived]
        return not self.waiting

    def report(self) -> set[str]:
        """As the head of these ranks, all of which have been heard, say it to the leader.

        Returns:
            The keys that it takes.
        """
        messages = [self.arrived[rank] for rank in self._ranks]
        return put(self._store, report_key(self._folder, self._ranks), _packed(messages))


class BlockTopics:
    """What a block has to say of one topic after the other, as its head passes it on.

    On any other rank all this does nothing.
    """

    def __init__(self, store: Store, blocks: Blocks) -> None:
        self._store, self._blocks = store, blocks
        self._topics: list[Topic] = []

    def add(self, folder: str) -> None:
        """Another one, which this rank has come to."""
        if self._blocks.heading:
            self._topics.append(Topic(self._store, folder, self._blocks.mine))

    def report(self) -> set[str]:
        """Pass on what all of the block have said by now; the keys that it takes."""
        keys: set[str] = set()
        while self._topics and self._topics[0].all_here():
            keys |= self._topics.pop(0).report()
        return keys

    def waiting(self) -> list[int]:
        """Whom this rank waits for."""
        return self._topics[0].waiting if self._topics else []

    def settle(self) -> None:
        """The leader has gone on from all of them: it may have read for itself."""
        self._topics.clear()


class WholeTopic:
    """What all ranks say, as their leader hears it: its own block, and the reports of the heads."""

    def __init__(
        self,
        store: Store,
        folder: str,
        blocks: Blocks,
        known: Mapping[int, bytes],
        deadline: float,
    ) -> None:
        self._store, self._folder = store, folder
        self._mine = Topic(store, folder, [rank for rank in blocks.mine if rank not in known])
        self._reports = Reports(blocks, deadline)
        self.arrived = dict(known)
        """Rank -> its message."""

    def all_here(self) -> bool:
        """Whether all have been heard."""
        here = self._mine.all_here()
        self.arrived.update(self._mine.arrived)
        return here and self._reports.all_here(self._reported, self._said)

    def awaited(self) -> list[int]:
        """Whom the leader waits for, as far as it can tell."""
        return [*self._mine.waiting, *self._reports.awaited()]

    def _reported(self, blocks: Sequence[Sequence[int]]) -> bool:
        keys = [report_key(self._folder, block) for block in blocks]
        if not self._store.check(keys):
            return False
        values = self._store.multi_get(keys)
        for block, key, value in zip(blocks, keys, values, strict=True):
            self.arrived.update(_unpacked(whole(self._store, key, value), block))
        return True

    def _said(self, block: Sequence[int]) -> bool:
        itself = Topic(self._store, self._folder, block)
        here = itself.all_here()
        self.arrived.update(itself.arrived)
        return here


def put(store: Store, key: str, message: bytes) -> set[str]:
    """Write a message, or how many pieces it has and those; the keys."""
    if len(message) <= _SMALL:
        store.set(key, b"=" + message)
        return {key}
    pieces = [f"{key}/{number}" for number in range(math.ceil(len(message) / _PIECE))]
    for number, piece in enumerate(pieces):
        store.set(piece, message[number * _PIECE : (number + 1) * _PIECE])
    store.set(key, str(len(pieces)))  # last: whoever sees it finds the rest
    return {key, *pieces}


def whole(store: Store, key: str, value: bytes) -> bytes:
    """The message, of which the key holds this value."""
    if value.startswith(b"="):
        return value[1:]
    return b"".join(store.get(f"{key}/{number}") for number in range(int(value)))


def _first_of(store: Store, keys: Sequence[str]) -> list[bytes]:
    """The messages of these keys, up to one that is not there yet, or less."""
    while keys and not store.check(keys):
        keys = keys[: len(keys) // 2]
    values = store.multi_get(keys)
    return [whole(store, key, value) for key, value in zip(keys, values, strict=True)]


def _packed(messages: Sequence[bytes]) -> bytes:
    """As one; nothing where they all are empty."""
    if not any(messages):
        return b""
    return b"".join(len(each).to_bytes(_LENGTH, "big") + each for each in messages)


def _unpacked(report: bytes, ranks: Sequence[int]) -> Mapping[int, bytes]:
    """Rank -> its message, of what :func:`_packed` made."""
    found, at = {}, 0
    for rank in ranks:
        size = int.from_bytes(report[at : at + _LENGTH], "big")
        found[rank] = report[at + _LENGTH : at + _LENGTH + size]
        at += _LENGTH + size
    return found
