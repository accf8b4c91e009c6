"""The sockets of this process that belong to a store.

torch shows them only in ``repr``, which looks up the names of both ends of the connection in the
DNS. This takes 5 s or more if the DNS does not answer, or drops requests from many ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator


def hosts(port: int) -> bool:
    """True if this process hosts the store at a port.

    False if it is also connected to that port on another host. Must not be called while Python has
    a default timeout (``socket.setdefaulttimeout``), which Python would set on the store's own
    sockets.
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
    """Shut down this process's connections to a port, on any host."""
    for own in _tcp_sockets():
        with own, contextlib.suppress(OSError):
            if _other_end(own)[1] == port != own.getsockname()[1]:
                own.shutdown(socket.SHUT_RDWR)


def _other_end(own: socket.socket) -> tuple[str, int]:
    try:
        host, port, *_ = own.getpeername()
    except OSError:  # not connected
        return "", 0
    return host, port


def _tcp_sockets() -> Iterator[socket.socket]:
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, as the one used for listing
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found = socket.socket(fileno=os.dup(number))
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    yield found
                else:
                    found.close()
