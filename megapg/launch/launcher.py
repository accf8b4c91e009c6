"""What every launcher has: a way to tell that it started this process, and what it says then.

Each reads its own variables only, so that no launch is put together from two sources; which one
speaks for the process is decided in :mod:`megapg.launch.detect`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from megapg.errors import LaunchError
from megapg.launch.environment import Variables
from megapg.launch.nodes import address_of
from megapg.launch.process import Launch


@dataclass(frozen=True)
class Place:
    """Where the ranks meet, as far as somebody said so."""

    address: str | None = None  # host; None where nobody did
    port: int | None = None  # TCP port there; None where nobody did
    # gives an address for the name of a cluster's node
    address_of: Callable[[str], str] = address_of

    def origin(self, address: str, port: str) -> str:
        """Where the address and the port come from; ``address`` and ``port`` where nobody said."""
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
    variables: Variables  # the rest of what it said

    def __post_init__(self) -> None:
        check_range(self.rank, self.world_size, self.names)

    @classmethod
    def detect(cls, variables: Variables) -> Self | None:
        """This launcher, if it started the process: None where none of its variables is set, and a
        LaunchError where some are missing or no numbers.
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
        """All it says; a LaunchError where there is no way to tell where the ranks meet."""


def check_range(rank: int, world_size: int, names: Sequence[str]) -> None:
    """Refuse what is no rank of that world; the variables are named."""
    if not 0 <= rank < world_size:
        raise LaunchError(f"{names[0]}={rank} is not within {names[1]}={world_size}.")
