"""The nodes of a SLURM job: their names and addresses."""

from __future__ import annotations

import importlib
import re
import socket
import subprocess

from megapg.errors import LaunchError

# Seconds to wait for scontrol: a slow controller may answer, a dead one must not block the job.
_PATIENCE = 15.0


def names(hostlist: str, count: int, variable: str) -> list[str]:
    """Return the node names of a list such as ``gpu[001-004,7],login``.

    Uses python-hostlist if installed, else ``scontrol``, or neither for a list of plain names.
    ``scontrol`` accepts invalid lists, so the number of names must be ``count``.
    """
    try:
        found = _expanded(hostlist) if "[" in hostlist else hostlist.split(",")
        problem = f"names {len(found)} nodes, but the step has {count}"
    except Exception as error:  # the library's own error class may not be importable
        found, problem = [], f"can't be read: {error}"
    if len(found) != count:
        raise LaunchError(
            f"{variable}={hostlist!r} {problem}. Set MASTER_ADDR to the host of rank 0."
        )
    return found


def address_of(node: str) -> str:
    """Return the name if it resolves, else the address that SLURM has for the node.

    Raises:
        LaunchError: neither resolves.
    """
    if _resolves(node):
        return node
    try:
        known = re.search(r"\bNodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", node))
    except OSError as error:
        problem = f"SLURM does not tell its address: {error}"
    else:
        if known is not None and _resolves(known[1]):
            return known[1]
        problem = f"SLURM has {known[1] if known else 'none'!r} for its NodeAddr, which is no help"
    raise LaunchError(
        f"there is no host called {node!r}, and {problem}. Set MASTER_ADDR to an address of rank "
        "0's host."
    )


def _expanded(hostlist: str) -> list[str]:
    try:
        library = importlib.import_module("hostlist")
    except ImportError:
        return _scontrol("show", "hostnames", hostlist).split()
    return list(library.expand_hostlist(hostlist))


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True


def _scontrol(*arguments: str) -> str:
    """Return the output of scontrol; raise an OSError if it fails."""
    try:
        done = subprocess.run(
            ["scontrol", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        raise OSError("there is no scontrol here") from None
    except subprocess.TimeoutExpired:
        raise OSError(f"scontrol gave no answer in {_PATIENCE:g} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise OSError(f"scontrol ended with status {done.returncode}: {said}")
    return done.stdout
