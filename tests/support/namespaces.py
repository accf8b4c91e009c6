"""Two hosts on one machine: network namespaces, a cable, and a host name for each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import captured

ROOT = Path(__file__).parents[2]

# A namespace for network, mounts (so that /sys shows that network) and host name. The command
# starts after it reads a line, when the cable exists.
_ENTER = ("unshare", "--net", "--mount", "--uts")
_WAIT = 'hostname "$1"; mount -t sysfs sysfs /sys; read -r go; shift; exec "$@"'


def lacking() -> str:
    """Return why this machine cannot make namespaces; empty if it can."""
    for tool in ("unshare", "ip", "nsenter", "hostname"):
        if shutil.which(tool) is None:
            return f"there is no {tool} here"
    tried = captured(
        [
            *_ENTER,
            "sh",
            "-c",
            "mount -t sysfs sysfs /sys && ip link add fast0 type veth peer name fast1",
        ],
        timeout=30,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Host:
    """One of two hosts: its name, its end of the cable, and the address of that end."""

    name: str
    interface: str
    address: str


HOSTS = (Host("alpha", "fast0", "10.91.0.1"), Host("beta", "fast1", "10.91.0.2"))


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


def run(
    *commands: Sequence[str], environment: Mapping[str, str], timeout: float
) -> tuple[Ended, ...]:
    """Run a command on each host, and kill commands that take too long.

    Each command gets the environment of torchrun, with the first host as ``MASTER_ADDR`` by
    default.
    """
    with ExitStack() as stack:
        processes = [
            stack.enter_context(_process(host, command, rank, len(commands), environment))
            for rank, (host, command) in enumerate(zip(HOSTS, commands, strict=False))
        ]
        _lay_cable([process.pid for process in processes])
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            ended.append(Ended(process.returncode, out, err))
        return tuple(ended)


@contextmanager
def _process(
    host: Host, command: Sequence[str], rank: int, world: int, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": HOSTS[0].address,
        "MASTER_PORT": "29511",  # no other process uses this network
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [*_ENTER, "sh", "-c", _WAIT, "sh", host.name, sys.executable, *command],
        env={"PATH": os.environ["PATH"], "HOME": "/nowhere", **variables, **environment},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _lay_cable(pids: Sequence[int]) -> None:
    # Without a second host, both ends of the cable stay in the first.
    ends = [*pids, pids[0]][:2]
    commands = [
        (pids[0], f"link add fast0 type veth peer name fast1 netns {ends[1]}"),
        *((pid, f"addr add {host.address}/24 dev {host.interface}") for pid, host in _each(ends)),
        *((pid, f"link set {host.interface} up") for pid, host in _each(ends)),
        *((pid, "link set lo up") for pid in pids),
    ]
    for pid in pids:
        _wait_until_apart(pid)
    for pid, words in commands:
        subprocess.run(
            ["nsenter", "--target", str(pid), "--net", "ip", *words.split()],
            check=True,
            timeout=120,
        )


def _wait_until_apart(pid: int) -> None:
    """Wait until a process has entered its own network."""
    deadline = time.monotonic() + 60
    while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        assert time.monotonic() < deadline, f"process {pid} has not left our network"
        time.sleep(0.01)


def _each(pids: Sequence[int]) -> list[tuple[int, Host]]:
    return list(zip(pids, HOSTS, strict=True))
