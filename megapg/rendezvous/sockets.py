"""The sockets of this process that belong to a store.

torch tells of them in a text only (``repr``), for which it asks the DNS for the names of both ends
of its connection: 5 s and more where the DNS does not answer, or drops what many ranks ask at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


def hosts(port: int) -> bool:
    """Whether this process hosts the store at a port, and talks to no such port on another host.

    Not to be called while Python has a default timeout (``socket.setdefaulttimeout``): Python would
    set that timeout on the store's own sockets.
    """
    listens = False
    for own in _tcp_sockets():
        with own:
            here, at, *_ = own.getsockname()
            there, leads_to = _other_end(own)
            if at == port:
                listens |= bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            elif leads_to == port and there != here:
                return False
    return listens


def hang_up(port: int) -> None:
    """End this process's connections to a port, on any host."""
    for own in _tcp_sockets():
        with own, contextlib.suppress(OSError):
            if _other_end(own)[1] == port != own.getsockname()[1]:
                own.shutdown(socket.SHUT_RDWR)


def _other_end(own: socket.socket) -> tuple[str, int]:
    try:
        host, port, *_ = own.getpeername()
    except OSError:  # it is not connected, or no longer
        return "", 0
    return host, port


def _tcp_sockets() -> Iterator[socket.socket]:
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, the listing's own for one
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found = socket.socket(fileno=os.dup(number))
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
                else:
                    found.close()
