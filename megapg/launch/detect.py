"""Choose the source of rank and address if there are several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from megapg.launch import slurm_nodes
from megapg.launch.by_hand import ByHand
from megapg.launch.environment import Variables
from megapg.launch.launcher import Launcher, Place
from megapg.launch.openmpi import OpenMpi
from megapg.launch.process import Launch
from megapg.launch.ray_actor import RayActor
from megapg.launch.slurm import Slurm, refuse_shell
from megapg.launch.torchrun import Torchrun
from megapg.launch.unsupported import refuse_unknown, refuse_within

# Innermost first: srun or mpirun may start torchrun, and mpirun starts its daemons with srun.
_LAUNCHERS: tuple[type[Launcher], ...] = (Torchrun, OpenMpi, Slurm)


def detect(
    environment: Mapping[str, str] = os.environ,
    *,
    address_of: Callable[[str], str] = slurm_nodes.address_of,
    actor: Callable[[], RayActor | None] = RayActor.here,
) -> Launch:
    """Read this process's rank and address from the environment variables of its launcher.

    Rank, world size and local rank come from one source: torchrun, Open MPI, SLURM's ``srun``, or
    the variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` set
    by hand. With Open MPI and SLURM you may set only the last two, to choose where the ranks meet.
    Without ``LOCAL_RANK``, the local rank is known if all ranks are on one host, or one on each
    host. If no variable is set, this process is the only rank.

    Args:
        environment: the environment variables of this process.
        address_of: maps the name of a SLURM node to an address. Default: ask the resolver, then
            SLURM.
        actor: returns the Ray actor that this process runs, if it runs one.

    Raises:
        LaunchError: variables are missing, contradict each other, or are no numbers. Or this is the
            shell of an allocation and not one of its tasks. Or this is one of several processes, in
            the job or on its host, and its rank or the address is unknown.
    """
    variables = Variables(environment)
    by_hand = ByHand(variables)
    if (ray_actor := actor()) is not None:  # the variables of a launcher are those of its node
        if not by_hand:
            ray_actor.refuse_alone()
        return by_hand.launch(ray_actor)
    found = (launcher.detect(variables) for launcher in _LAUNCHERS)
    launcher = next((each for each in found if each is not None), None)
    if launcher is not None:
        if by_hand.divides(launcher):
            return by_hand.launch()
        by_hand.refuse_unless_it_repeats(launcher)
        if isinstance(launcher, Slurm):  # the outermost launcher: another may run inside it
            refuse_within(variables, launcher)
        return launcher.launch(Place(by_hand.address, by_hand.port, address_of))
    if by_hand:
        return by_hand.launch()
    refuse_unknown(variables)
    refuse_shell(variables)
    by_hand.refuse_one_of_several()
    return Launch("a single process")
