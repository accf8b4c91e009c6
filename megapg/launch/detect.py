"""Who speaks for this process, where more than one might."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from megapg.launch import nodes
from megapg.launch.by_hand import ByHand
from megapg.launch.environment import Variables
from megapg.launch.launcher import Launcher, Place
from megapg.launch.openmpi import OpenMpi
from megapg.launch.process import Launch
from megapg.launch.slurm import Slurm, refuse_shell
from megapg.launch.torchrun import Torchrun
from megapg.launch.unsupported import refuse_unknown, refuse_within

# The innermost first: torchrun is started by srun or mpirun, and mpirun starts its daemons by srun.
_LAUNCHERS: tuple[type[Launcher], ...] = (Torchrun, OpenMpi, Slurm)


def detect(
    environment: Mapping[str, str] = os.environ,
    *,
    address_of: Callable[[str], str] = nodes.address_of,
) -> Launch:
    """Who this process is, by the variables of whatever started it.

    Rank, world size and local rank come from one source: torchrun, Open MPI, SLURM's ``srun``, or
    the variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` set
    by hand. With Open MPI and SLURM the last two may be set alone, and say where to meet; otherwise
    that follows from the launcher. ``LOCAL_RANK`` may be left out: then it is what is
    certain (all ranks are on one host, or one on each), or unknown. Nothing set at all means a
    process alone.

    Args:
        environment: this process's.
        address_of: gives an address for the name of a SLURM node; asks the resolver, then SLURM.

    Raises:
        LaunchError: variables are missing, contradict each other, or are no numbers; this is the
            shell of an allocation and no task of it; this is one of several processes, in the job
            or on its host, and nobody says which, or where to meet.
    """
    variables = Variables(environment)
    found = (launcher.detect(variables) for launcher in _LAUNCHERS)
    launcher = next((each for each in found if each is not None), None)
    by_hand = ByHand(variables)
    if launcher is not None:
        if by_hand.divides(launcher):
            return by_hand.launch()
        by_hand.refuse_unless_it_repeats(launcher)
        if isinstance(launcher, Slurm):  # the outermost, so another may have come in between
            refuse_within(variables, launcher)
        return launcher.launch(Place(by_hand.address, by_hand.port, address_of))
    if by_hand:
        return by_hand.launch()
    refuse_unknown(variables)
    refuse_shell(variables)
    by_hand.refuse_one_of_several()
    return Launch("a single process")
