"""Messages from ranks to their leader in a folder of the store. They may be long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megapg.rendezvous.blocks import Blocks, Reports, report_key
from megapg.rendezvous.store import Store, batches

# TCPStore refuses values of 8 MiB and more. Bytes.
_PIECE_SIZE = 4 * 2**20
# Larger messages are split. Smaller ones are single values, so that many are read with one call.
_LARGEST_WHOLE = 2**16
# Size in bytes of the length before each message in a report.
_LENGTH_SIZE = 8


class Topic:
    """The messages of some ranks on one topic, as far as they have arrived.

    Attributes:
        arrived: rank -> its message.
        waiting: ranks without a message.
    """

    def __init__(self, store: Store, folder: str, ranks: Sequence[int]) -> None:
        self._store, self._folder, self._ranks = store, folder, ranks
        self.arrived: dict[int, bytes] = {}
        self.waiting = list(ranks)

    def all_here(self) -> bool:
        """True if all messages have arrived."""
        for some in batches(self.waiting):
            found = _first_of(self._store, [f"{self._folder}/{rank}" for rank in some])
            self.arrived.update(zip(some, found, strict=False))
            if len(found) < len(some):
                break  # polled again soon, and the next batch can wait
        self.waiting = [rank for rank in self.waiting if rank not in self.arrived]
        return not self.waiting

    def report(self) -> set[str]:
        """As the head of these ranks, report all their messages to the leader.

        Returns:
            The keys written.
        """
        messages = [self.arrived[rank] for rank in self._ranks]
        return put(self._store, report_key(self._folder, self._ranks), _packed(messages))


class BlockTopics:
    """The topics that the head of a block reports, one after the other.

    On other ranks all methods do nothing.
    """

    def __init__(self, store: Store, blocks: Blocks) -> None:
        self._store, self._blocks = store, blocks
        self._topics: list[Topic] = []

    def add(self, folder: str) -> None:
        """Add a topic that this rank has reached."""
        if self._blocks.heading:
            self._topics.append(Topic(self._store, folder, self._blocks.mine))

    def report(self) -> set[str]:
        """Report each complete topic. Return the keys written."""
        keys: set[str] = set()
        while self._topics and self._topics[0].all_here():
            keys |= self._topics.pop(0).report()
        return keys

    def waiting(self) -> list[int]:
        """Return the ranks that this rank waits for."""
        return self._topics[0].waiting if self._topics else []

    def settle(self) -> None:
        """Forget the topics, as the leader has gone on and may have read the messages itself."""
        self._topics.clear()


class WholeTopic:
    """The messages of all ranks on one topic, on the leader: from its block and from the heads."""

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
        """True if all messages have arrived."""
        here = self._mine.all_here()
        self.arrived.update(self._mine.arrived)
        return here and self._reports.all_here(self._reported, self._said)

    def awaited(self) -> list[int]:
        """Return the ranks that the leader waits for, as far as it knows."""
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
    """Write a message, large ones in pieces. Return the keys."""
    if len(message) <= _LARGEST_WHOLE:
        store.set(key, b"=" + message)
        return {key}
    pieces = [f"{key}/{number}" for number in range(math.ceil(len(message) / _PIECE_SIZE))]
    for number, piece in enumerate(pieces):
        store.set(piece, message[number * _PIECE_SIZE : (number + 1) * _PIECE_SIZE])
    store.set(key, str(len(pieces)))  # last, so that a reader of this key finds all pieces
    return {key, *pieces}


def whole(store: Store, key: str, value: bytes) -> bytes:
    """Return the message of a key, given the key's value."""
    if value.startswith(b"="):
        return value[1:]
    return b"".join(store.get(f"{key}/{number}") for number in range(int(value)))


def _first_of(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the messages of the first keys that exist, perhaps not of all of them."""
    while keys and not store.check(keys):
        keys = keys[: len(keys) // 2]
    values = store.multi_get(keys)
    return [whole(store, key, value) for key, value in zip(keys, values, strict=True)]


def _packed(messages: Sequence[bytes]) -> bytes:
    """Join messages, each with its length. Empty if all of them are empty."""
    if not any(messages):
        return b""
    return b"".join(len(each).to_bytes(_LENGTH_SIZE, "big") + each for each in messages)


def _unpacked(report: bytes, ranks: Sequence[int]) -> Mapping[int, bytes]:
    """Return rank -> message from the output of :func:`_packed`."""
    found, at = {}, 0
    for rank in ranks:
        size = int.from_bytes(report[at : at + _LENGTH_SIZE], "big")
        found[rank] = report[at + _LENGTH_SIZE : at + _LENGTH_SIZE + size]
        at += _LENGTH_SIZE + size
    return found
