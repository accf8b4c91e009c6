"""Messages from ranks to their leader in a folder of the store. They may be long."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megapg.rendezvous.store import Store, batches

# TCPStore refuses values of 8 MiB and more. Bytes.
_PIECE_SIZE = 4 * 2**20
# Larger messages are split. Smaller ones are single values, so that many are read with one call.
_LARGEST_WHOLE = 2**16


class Topic:
    """The messages of some ranks on one topic, as far as they have arrived.

    Attributes:
        arrived: rank -> its message.
        waiting: ranks without a message.
    """

    def __init__(self, store: Store, folder: str, ranks: Sequence[int]) -> None:
        self._store, self._folder = store, folder
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
