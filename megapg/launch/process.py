"""The description of a process in its job, as a value."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from megapg.errors import LaunchError
from megapg.launch.environment import overridden


@dataclass(frozen=True)
class Launch:
    """A process's rank in its job, and where the ranks meet.

    :func:`~megapg.launch.detect` reads it from the environment. If megapg does not know the
    launcher of the job, make a Launch and pass it to ``megapg.session(launch=...)``. The default is
    a process alone.

    Attributes:
        launcher: the name of the launcher, for messages.
        rank: global rank of this process.
        world_size: number of processes.
        local_rank: index of this process on its host: the accelerator it uses. Default: 0 if there
            is one process per host, the rank if all are on this host (as with a loopback address),
            else None for unknown.
        local_world_size: number of processes on this host; None if unknown.
        address: host where the ranks meet; empty for a process alone.
        port: TCP port there.
        hosted: True if the launcher runs the store, so that no rank has to.
        attempt: number of restarts of this job by the launcher, from 0.
        job: distinguishes this job from others at the same port; equal on all ranks.
        hosts: rank -> name of its host; empty if unknown.
        origin: the source of address and port, for messages.
        socket: in rank 0's process, the descriptor of a socket that is bound to the port; None to
            bind it when the session opens. The session takes it over, so no other program can get
            the port in between.

    Raises:
        LaunchError: the values do not fit together.
    """

    launcher: str = "launch="
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    address: str = ""
    port: int = 0
    hosted: bool = False
    attempt: int = 0
    job: str = ""
    hosts: Sequence[str] = ()
    origin: str = "address= and port= of launch="
    socket: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"rank {self.rank} of {self.launcher} is not within its world of "
                f"{self.world_size} ranks."
            )
        if self.local_rank is None:
            object.__setattr__(self, "local_rank", self._certain_local_rank())
        elif self.local_rank < 0:
            raise LaunchError(f"local rank {self.local_rank} of {self.launcher} is below 0.")
        if self.address and not 0 < self.port < 65_536:
            raise LaunchError(
                f"port {self.port} ({self.origin}) is none: give one from 1 to 65535."
            )
        if self.world_size > 1 and not self.address:
            raise LaunchError(
                f"{self.launcher}: {self.world_size} ranks need an address= and a port= to meet at."
            )

    def _certain_local_rank(self) -> int | None:
        if self.world_size == 1 or self.local_world_size == 1:
            return 0
        together = self.local_world_size == self.world_size or is_loopback(self.address)
        return self.rank if together else None

    @classmethod
    def alone(cls) -> Self:
        """A process alone, whatever the environment says.

        Pass ``megapg.session(launch=Launch.alone())`` if :func:`~megapg.launch.detect` takes the
        process for one of several, but a process alone is meant. Examples: the shell of a SLURM
        allocation, or the pods of an Indexed Job if they are independent.
        """
        return cls(launcher="Launch.alone()")

    def environment(self) -> dict[str, str]:
        """Return this launch as torchrun's variables, for code that reads them."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.address or "127.0.0.1",
            "MASTER_PORT": self.port,  # 0 stands for any port, for a process alone
            "TORCHELASTIC_RESTART_COUNT": self.attempt,
        }
        if self.local_rank is not None:
            variables["LOCAL_RANK"] = self.local_rank
        if self.local_world_size is not None:
            variables["LOCAL_WORLD_SIZE"] = self.local_world_size
        if self.hosted:
            variables["TORCHELASTIC_USE_AGENT_STORE"] = True
        return {name: str(value) for name, value in variables.items()}

    @contextlib.contextmanager
    def exported(self) -> Iterator[None]:
        """Context that sets :meth:`environment` in ``os.environ`` and restores it at the end."""
        with overridden(self.environment()):
            yield


def is_loopback(address: str) -> bool:
    """True if the address is a loopback address."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def ranks_said(ranks: Iterable[int]) -> str:
    """Format ranks: ``ranks 0-7, 9`` or ``rank 3``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"rank {said}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {said}"
