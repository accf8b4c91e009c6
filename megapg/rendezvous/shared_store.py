"""A store that one process hosts for the ranks of several jobs, and the connection to it."""

from __future__ import annotations

import os
import socket
import time
from typing import Self
from urllib.parse import urlsplit

import torch.distributed as dist
from typing_extensions import override

from megapg.errors import RendezvousError, SessionError
from megapg.launch import Launch
from megapg.rendezvous.job_store import connect, what_is_there
from megapg.rendezvous.store import Host, Store, host_of

# The key that names the process that hosts the store.
_HOSTED_BY = "megapg hosted by"


class SharedStore:
    """A store that this process hosts, on a free port, for the ranks of several jobs.

    Pass its ``address`` to the other processes, and keep the object: the store ends with it. Use it
    as a context manager, or call :meth:`close` once no group uses it any more.

    Args:
        host: the name or address under which the other processes reach this one. Default: the
            address of the interface that leads to other hosts.

    Attributes:
        address: for ``store=`` of :func:`megapg.joint_group`, as in ``tcp://10.0.0.7:41563``.
    """

    def __init__(self, host: str | None = None) -> None:
        host = host or _own_address()
        hosted = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        hosted.set(_HOSTED_BY, f"process {os.getpid()} on {socket.gethostname()}")
        self._store: dist.Store | None = hosted
        self._connections: list[Store] = []
        self.address = f"tcp://{f'[{host}]' if ':' in host else host}:{hosted.port}"

    def close(self) -> None:
        """Stop hosting. Other processes that use the store get errors. Closing twice is fine.

        If a group of this process ended in an error, this first waits a few seconds for the other
        ranks to read it.
        """
        while self._connections:
            self._connections.pop().linger()
        self._store = None

    def connect(self, timeout: float) -> Store:
        """Return another connection to the store, for this process."""
        self._connections.append(shared_store(self.address, timeout, here=True))
        return self._connections[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @override
    def __repr__(self) -> str:
        return f"<SharedStore {self.address}{'' if self._store is not None else ', closed'}>"


def shared_store(address: str, timeout: float, *, here: bool = False) -> Store:
    """Connect to a store that some process hosts, such as a :class:`SharedStore`.

    Args:
        address: ``tcp://host:port``.
        timeout: seconds to wait for the host of the store.
        here: True if this process hosts it.

    Raises:
        RendezvousError: the store can't be reached.
        SessionError: this is no address.
    """
    place, deadline = _place(address), time.monotonic() + timeout
    try:
        opened = connect(place, False, deadline)
    except (RuntimeError, TimeoutError):
        raise RendezvousError(
            f"the store at {address} could not be reached within {timeout:g} s: "
            f"{what_is_there(place)}. See whether the process that hosts it still runs, and "
            "whether it gave this address."
        ) from None
    store = Store(opened, Host(f"the store at {address}"))
    with store.until(deadline, address):
        said = store.peek(_HOSTED_BY)
    by = f" that {said.decode()} hosts" if said else ""
    return Store(opened, Host(f"the store{by} at {address}", here=here))


def connected(
    store: str | SharedStore | dist.Store, timeout: float
) -> tuple[Store, tuple[str, int] | None]:
    """Return a connection to a store, and its host and port if it is a TCP store.

    Raises:
        RendezvousError: the store can't be reached.
        SessionError: this is neither a store nor the address of one.
    """
    if isinstance(store, SharedStore):
        return store.connect(timeout), _host_and_port(store.address)
    if isinstance(store, str):
        return shared_store(store, timeout), _host_and_port(store)
    if not isinstance(store, dist.Store):
        raise SessionError(
            f"store={store!r}: give an address, 'tcp://host:port', or torch's store."
        )
    # torch makes one call at a time on each connection, so open another one.
    connection = Store(store, host_of(store, "the store given with store=")).clone()
    return connection, (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or 0


def _place(address: str) -> Launch:
    """Return an address as a launch of one process."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or not port or parts.scheme != "tcp":
        raise SessionError(f"store={address!r}: give an address such as 'tcp://10.0.0.7:41563'.")
    return Launch(launcher="a shared store", address=host, port=port, hosted=True)


def _own_address() -> str:
    """Return the address of the interface that leads to other hosts. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation, which no host has
        except OSError:  # no network
            return "127.0.0.1"
        return str(probe.getsockname()[0])
