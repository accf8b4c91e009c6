"""Exchange the addresses of lazily connected communicators with one message per rank.

A lazy gloo communicator writes its own address to its store when it is created, and reads a peer's
address when the two first communicate. Over the network this costs one round trip per communicator
and two per pair, all to the host of the store. Here each communicator gets a store inside its own
process. Its addresses are sent together with the message that this rank is ready. When all ranks
are ready, each rank fetches the addresses of its peers at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from megapg import torch_private
from megapg.communicators.backends import backend_for
from megapg.communicators.needed import Communicator
from megapg.rendezvous.store import Store

# The traffic grows with the square of the size, as every member fetches every other address. Larger
# communicators look up addresses when they need them.
_LARGEST = 64


class AddressBook:
    """The addresses of one rank's communicators.

    Args:
        shared: a store for these ranks alone.
        timeout: the time that a communicator waits for an address.
    """

    def __init__(self, shared: Store, timeout: timedelta) -> None:
        self._shared, self._timeout = shared, timeout
        self._pages: dict[Communicator, dist.Store] = {}

    def store_for(self, communicator: Communicator) -> dist.Store:
        """Return the store in which the communicator writes and reads addresses.

        A communicator that connects when it is created uses the shared store.
        """
        lazy = backend_for(communicator.backend).connects_lazily
        if not lazy or len(communicator.ranks) > _LARGEST:
            return self._shared.torch
        page = dist.HashStore()
        if not torch_private.lists_keys(page):  # mine() has to list the keys
            return self._shared.torch
        page.set_timeout(self._timeout)
        self._pages[communicator] = page
        return page

    def mine(self, rank: int) -> dict[str, bytes]:
        """Return this rank's addresses for the shared store: key -> value."""
        return {
            _key(communicator, rank): _entry(page)
            for communicator, page in self._pages.items()
            if len(communicator.ranks) > 1
        }

    def fill_in(self, rank: int) -> None:
        """Fetch the other ranks' addresses. All of them must be in the shared store by now."""
        missing = [
            (page, _key(communicator, other))
            for communicator, page in self._pages.items()
            for other in communicator.ranks
            if other != rank
        ]
        if missing:
            entries = self._shared.multi_get([key for _, key in missing])
            for (page, _), entry in zip(missing, entries, strict=True):
                for key, address in _lines(entry):
                    page.set(key, address)  # type: ignore[arg-type]  # bytes too


def _key(communicator: Communicator, rank: int) -> str:
    return f"address/{communicator.label}/{rank}"


def _entry(page: dist.Store) -> bytes:
    """Encode (key, length, address) for each address; TORCH_DISTRIBUTED_DEBUG adds keys."""
    addresses = {key: page.get(key) for key in page.list_keys()}
    return b"".join(
        b"%s\0%d\0%s" % (key.encode(), len(address), address) for key, address in addresses.items()
    )


def _lines(entry: bytes) -> Iterator[tuple[str, bytes]]:
    while entry:
        key, length, rest = entry.split(b"\0", 2)
        yield key.decode(), rest[: int(length)]
        entry = rest[int(length) :]
