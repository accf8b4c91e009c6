"""Handing round the addresses of lazily connected communicators: one message a rank, not one each.

A gloo communicator that connects lazily does two things with its store: it writes its own address
when it is made, and reads a peer's when the two first talk. Over the network that is a round trip
per communicator and two per pair, all to the one process that hosts the store. Here each gets a
store inside its own process; what it wrote there goes to the others together with the word that
this rank is ready, and theirs are fetched at once when all are.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from megapg import torch_private
from megapg.communicators.backends import backend_for
from megapg.communicators.plan import Communicator
from megapg.rendezvous.store import Store

# Every member fetches every other member's address, so the traffic grows with the square; a larger
# communicator looks up those it needs.
_LARGEST = 64


class AddressBook:
    """The addresses of one rank's communicators.

    Args:
        shared: a store that all the ranks share and nobody else uses.
        timeout: how long a communicator waits for an address.
    """

    def __init__(self, shared: Store, timeout: timedelta) -> None:
        self._shared, self._timeout = shared, timeout
        self._pages: dict[Communicator, dist.Store] = {}

    def store_for(self, communicator: Communicator) -> dist.Store:
        """Where the communicator shall write its address and read those of others.

        One that connects as it is made meets its peers in the shared store.
        """
        lazy = backend_for(communicator.backend).connects_lazily
        if not lazy or len(communicator.ranks) > _LARGEST:
            return self._shared.torch
        page = dist.HashStore()
        if not torch_private.lists_keys(page):  # nor could anybody hand round what is in it
            return self._shared.torch
        page.set_timeout(self._timeout)
        self._pages[communicator] = page
        return page

    def mine(self, rank: int) -> dict[str, bytes]:
        """What the others must know of this rank, for the shared store: key -> value."""
        return {
            _key(communicator, rank): _entry(page)
            for communicator, page in self._pages.items()
            if len(communicator.ranks) > 1
        }

    def fill_in(self, rank: int) -> None:
        """Fetch the others' entries; all of them must be in the shared store by now."""
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
    """Key, length of the address and address, of each; several with TORCH_DISTRIBUTED_DEBUG."""
    addresses = {key: page.get(key) for key in page.list_keys()}
    return b"".join(
        b"%s\0%d\0%s" % (key.encode(), len(address), address) for key, address in addresses.items()
    )


def _lines(entry: bytes) -> Iterator[tuple[str, bytes]]:
    while entry:
        key, length, rest = entry.split(b"\0", 2)
        yield key.decode(), rest[: int(length)]
        entry = rest[int(length) :]
