"""Ports that are free, and stay free until those they are for listen there."""

import socket

_held = []


def free_port():
    """Nobody else is given it while this process lives.

    A socket that does not listen holds it. Beside that one may listen whoever sets SO_REUSEADDR, as
    torch's stores and SLURM's daemons do; until then, connections to it are refused.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    return holder.getsockname()[1]
