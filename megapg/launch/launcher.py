"""Base class of launchers: detect if one started this process, and read its variables.

A launcher reads its own variables only, so no launch is put together from two sources.
:mod:`megapg.launch.detect` chooses the launcher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from megapg.errors import LaunchError
from megapg.launch.environment import Variables
from megapg.launch.process import Launch
from megapg.launch.slurm_nodes import address_of


@dataclass(frozen=True)
class Place:
    """The place where the ranks meet, as far as it was set."""

    address: str | None = None  # host; None if not set
    port: int | None = None  # TCP port there; None if not set
    # maps the name of a cluster's node to an address
    address_of: Callable[[str], str] = address_of

    def origin(self, address: str, port: str) -> str:
        """Name the source of address and port; ``address`` and ``port`` if MASTER_* are not set."""
        return (
            f"{address if self.address is None else 'MASTER_ADDR'}, "
            f"{port if self.port is None else 'MASTER_PORT'}"
        )


@dataclass(frozen=True)
class Launcher(ABC):
    """A launcher that started this process."""

    name: ClassVar[str]  # for messages
    # the variables that give rank, world size and local rank, for messages
    names: ClassVar[tuple[str, str, str]]
    also: ClassVar[tuple[str, ...]] = ()  # other variables that it always sets
    rank: int  # global rank of this process
    world_size: int  # number of processes
    local_rank: int  # index of this process on its host
    variables: Variables  # all variables of this process

    def __post_init__(self) -> None:
        check_range(self.rank, self.world_size, self.names)

    @classmethod
    def detect(cls, variables: Variables) -> Self | None:
        """Return this launcher if it started the process, None if none of its variables is set.

        Raises:
            LaunchError: some of its variables are missing or no numbers.
        """
        needed = (*cls.also, *cls.names)
        given = variables.among(needed)
        if not given:
            return None
        if missing := [name for name in needed if name not in given]:
            raise LaunchError(
                f"the environment has {', '.join(given)} of {cls.name}, but not "
                f"{', '.join(missing)}. Are they left over from another job? Unset them, or start "
                "again so that all are set."
            )
        rank, world_size, local_rank = (variables.number(name) for name in cls.names)
        return cls(rank, world_size, local_rank, variables)

    @abstractmethod
    def launch(self, place: Place) -> Launch:
        """Return the launch; raise a LaunchError if the address can't be known.

        The address is ``""`` for a single rank, which needs no port: another job on its host could
        take it. A launcher that names nodes, not addresses, asks ``place.address_of``.
        """


def check_range(rank: int, world_size: int, names: Sequence[str]) -> None:
    """Raise a LaunchError, which names the variables, if the rank is not in the world."""
    if not 0 <= rank < world_size:
        raise LaunchError(f"{names[0]}={rank} is not within {names[1]}={world_size}.")
