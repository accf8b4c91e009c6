"""Free ports that stay reserved until their users listen on them."""

import socket

_held = []


def free_port():
    """Reserve a free port while this process lives.

    A socket that does not listen holds the port. A process that sets SO_REUSEADDR, as torch's
    stores and SLURM's daemons do, may still listen on it. Until then, connections are refused.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    return holder.getsockname()[1]
