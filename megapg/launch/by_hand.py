"""The variables of torch's ``env://``, set by hand, by a script, or by a launcher we don't know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from megapg.errors import LaunchError
from megapg.launch.launch import Launch
from megapg.launch.launcher import Launcher, Place, check_range
from megapg.launch.variables import Variables

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ByHand:
    """What was set; unlike a launcher, somebody may have set a part only.

    Beside a launcher, address and port say where to meet. The others must repeat what it says, or
    divide each of its tasks into several ranks, as a script does that starts processes itself.
    """

    name = "the environment"
    variables: Variables
    rank: int | None
    world_size: int | None
    local_rank: int | None
    address: str | None
    port: int | None

    @classmethod
    def detect(cls, variables: Variables) -> Self:
        """What was set."""
        return cls(
            variables,
            variables.maybe("RANK"),
            variables.maybe("WORLD_SIZE"),
            variables.maybe("LOCAL_RANK"),
            variables.text("MASTER_ADDR") if "MASTER_ADDR" in variables else None,
            variables.maybe("MASTER_PORT"),
        )

    def __bool__(self) -> bool:
        return bool(self.variables.among(_NEEDED))

    def place(self, address_of: Callable[[str], str]) -> Place:
        """Where the ranks of a launcher are to meet."""
        return Place(self.address, self.port, address_of)

    def launch(self) -> Launch:
        """All of it.

        Raises:
            LaunchError: a part is missing.
        """
        given = self.variables.among(_NEEDED)
        if missing := [name for name in _NEEDED if name not in given]:
            raise LaunchError(
                f"the environment has {', '.join(given)} but not {', '.join(missing)}. Start with "
                "torchrun, srun or mpirun, or set all four, or none for a single process."
            )
        assert self.rank is not None
        assert self.world_size is not None
        check_range(self.rank, self.world_size, _NAMES)
        return Launch(
            launcher=self.name,
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank or 0,
            local_world_size=self.variables.maybe("LOCAL_WORLD_SIZE"),
            address=self.address or "",
            port=self.port or 0,
            origin="MASTER_ADDR, MASTER_PORT from the environment",
        )

    def divides(self, outer: Launcher) -> bool:
        """Whether this is one of several ranks that the launcher's task started itself."""
        if self.rank is None or self.world_size is None or None in (self.address, self.port):
            return False
        share, rest = divmod(self.world_size, outer.world_size)
        return share > 1 and not rest and self.rank // share == outer.rank

    def refuse_unless_it_repeats(self, outer: Launcher) -> None:
        """Nothing, if all that was set is what the launcher says too.

        Raises:
            LaunchError: two sources contradict each other; both are named.
        """
        ours = (self.rank, self.world_size, self.local_rank)
        theirs = (outer.rank, outer.world_size, outer.local_rank)
        different = [
            (f"{name}={mine}", f"{other}={yours}")
            for name, mine, other, yours in zip(_NAMES, ours, outer.names, theirs, strict=True)
            if mine is not None and mine != yours
        ]
        if different:
            given = ", ".join(self.variables.among(_NAMES))
            raise LaunchError(
                f"two sources contradict each other: {self.name} has "
                f"{', '.join(mine for mine, _ in different)}, but {outer.name} has "
                f"{', '.join(yours for _, yours in different)}. Unset {given} to let {outer.name} "
                "speak; or start the ranks with torchrun, which may run inside any other launcher."
            )
