"""The variables of torch's ``env://``, set by hand, by a script, or by an unknown launcher."""

from __future__ import annotations

from dataclasses import replace

from megapg.errors import LaunchError
from megapg.launch.environment import Variables
from megapg.launch.launcher import Launcher, check_range
from megapg.launch.process import Launch
from megapg.launch.ray_actor import RayActor
from megapg.launch.unsupported import local_rank, refuse_unknown

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ByHand:
    """The variables that are set. Unlike with a launcher, there may be only some of them.

    If a launcher is found as well, address and port say where the ranks meet. The other variables
    must repeat the launcher's values, or divide each of its tasks into several ranks, as a script
    does that starts processes itself.
    """

    name = "the environment"

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.rank, self.world_size, self.local_rank = map(variables.maybe, _NAMES)
        self.address = variables.text("MASTER_ADDR") if "MASTER_ADDR" in variables else None
        self.port = variables.maybe("MASTER_PORT")

    def __bool__(self) -> bool:
        return bool(self.variables.among(_NEEDED))

    def launch(self, actor: RayActor | None = None) -> Launch:
        """Return the launch, of an actor of Ray if one is given.

        Raises:
            LaunchError: a variable is missing.
        """
        given = self.variables.among(_NEEDED)
        if missing := [name for name in _NEEDED if name not in given]:
            if not {"RANK", "WORLD_SIZE"} & {*given}:  # an address alone gives no rank
                refuse_unknown(self.variables)
            raise LaunchError(
                f"the environment has {', '.join(given)} but not {', '.join(missing)}. Start with "
                "torchrun, srun or mpirun, or set all four, or none for a single process."
            )
        assert self.rank is not None
        assert self.world_size is not None
        check_range(self.rank, self.world_size, _NAMES)
        launch = Launch(
            launcher=self.name,
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            local_world_size=self.variables.maybe("LOCAL_WORLD_SIZE"),
            address=self.address or "",
            port=self.port or 0,
            origin="MASTER_ADDR, MASTER_PORT from the environment",
        )
        if actor is not None:
            device = actor.device(self.variables)
            return launch if device is None else replace(launch, local_rank=device)
        if launch.local_rank is None:
            found = local_rank(self.variables, self.rank, self.world_size)
            launch = replace(launch, local_rank=found)
        return launch

    def refuse_one_of_several(self) -> None:
        """Raise a LaunchError if this is one of several ranks on its host, without a source."""
        here = self.variables.whole("LOCAL_WORLD_SIZE") or 1
        if self.local_rank or here > 1:
            names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
            given = ", ".join(f"{n}={self.variables.text(n)}" for n in self.variables.among(names))
            raise LaunchError(
                f"the environment has {given}, so this is one of several ranks, but not "
                f"{', '.join(_NEEDED)}: each would train alone. Set them in each, or start with "
                "torchrun, srun or mpirun. If alone is meant, pass launch=megapg.Launch.alone()."
            )

    def divides(self, outer: Launcher) -> bool:
        """True if this is one of several ranks that a task of the launcher started itself."""
        if self.rank is None or self.world_size is None or None in (self.address, self.port):
            return False
        share, rest = divmod(self.world_size, outer.world_size)
        return share > 1 and not rest and self.rank // share == outer.rank

    def refuse_unless_it_repeats(self, outer: Launcher) -> None:
        """Raise a LaunchError, which names both sources, if a variable contradicts the launcher."""
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
