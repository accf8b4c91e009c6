"""What every launcher has: a way to tell that it started this process, and what it says then.

Each reads its own variables only, so that no launch is put together from two sources; which one
speaks for the process is decided in :mod:`megapg.launch.resolve`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from megapg.errors import LaunchError
from megapg.launch.launch import Launch
from megapg.launch.nodes import address_of
from megapg.launch.variables import Variables


@dataclass(frozen=True)
class Place:
    """Where the ranks meet, as far as somebody said so.

    Attributes:
        address: host; None where nobody did.
        port: TCP port there; None where nobody did.
        address_of: gives an address for the name of a cluster's node.
    """

    address: str | None = None
    port: int | None = None
    address_of: Callable[[str], str] = address_of

    def origin(self, address: str, port: str) -> str:
        """Where the address and the port come from; ``address`` and ``port`` where nobody said."""
        return (
            f"{address if self.address is None else 'MASTER_ADDR'}, "
            f"{port if self.port is None else 'MASTER_PORT'}"
        )


@dataclass(frozen=True)
class Launcher(ABC):
    """A launcher that started this process.

    Attributes:
        name: for messages.
        names: the variables that give rank, world size and local rank, for messages.
        rank: global rank of this process.
        world_size: number of processes.
        local_rank: index of this process on its host.
        variables: the rest of what it said.
    """

    name: ClassVar[str]
    names: ClassVar[tuple[str, str, str]]
    rank: int
    world_size: int
    local_rank: int
    variables: Variables

    def __post_init__(self) -> None:
        check_range(self.rank, self.world_size, self.names)

    @classmethod
    @abstractmethod
    def detect(cls, variables: Variables) -> Self | None:
        """This launcher, if it started the process.

        Raises:
            LaunchError: it did, but some of its variables are missing or no numbers.
        """

    @abstractmethod
    def launch(self, place: Place) -> Launch:
        """All it says; ``place`` where the user said where to meet.

        Raises:
            LaunchError: there is no way to tell where the ranks meet.
        """

    @classmethod
    def _read(cls, variables: Variables, *more: str) -> Self | None:
        """What it says; None where none of the variables is set, an error where some are."""
        needed = (*more, *cls.names)
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


def check_range(rank: int, world_size: int, names: Sequence[str]) -> None:
    """Nothing, if that is a rank of that world.

    Raises:
        LaunchError: it is not; the variables are named.
    """
    if not 0 <= rank < world_size:
        raise LaunchError(f"{names[0]}={rank} is not within {names[1]}={world_size}.")
