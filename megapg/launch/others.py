"""Launchers that megapg can name, but under which it does not know how ranks meet."""

from __future__ import annotations

from megapg.errors import LaunchError
from megapg.launch.launcher import Launcher
from megapg.launch.variables import Variables

# The variables of rank and world size, by launcher.
_KNOWN = {
    "Cray PALS": ("PALS_RANKID", "PALS_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "LSF's jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "Flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "MPICH, Intel MPI or the like": ("PMI_RANK", "PMI_SIZE"),
}


def refuse_within(variables: Variables, outer: Launcher) -> None:
    """Nothing, unless one of them started this process inside a task of ``outer``.

    Intel MPI, MPICH and Flux start their daemons with ``srun``, one on each node, and what these
    start has the daemon's variables: without this several ranks would take themselves for one task.

    Raises:
        LaunchError: it says something else than ``outer``; both are named.
    """
    for launcher, names in _KNOWN.items():
        said = dict(zip(names, (outer.rank, outer.world_size), strict=True))
        if any(variables.number(name, value) != value for name, value in said.items()):
            given = ", ".join(f"{n}={variables.text(n)}" for n in variables.among(names))
            raise LaunchError(
                f"two sources contradict each other: {launcher} has {given}, but {outer.name} has "
                f"{outer.names[0]}={outer.rank}, {outer.names[1]}={outer.world_size}. Start the "
                f"ranks with srun itself or with torchrun; or unset {', '.join(names)} to let "
                f"{outer.name} speak."
            )


def refuse_unknown(variables: Variables) -> None:
    """Nothing, unless one of them started this process beside others.

    Without this every rank of such a job would take itself for a process alone.

    Raises:
        LaunchError: it is one of several ranks.
    """
    for launcher, (rank, size) in _KNOWN.items():
        if variables.number(size, 1) > 1:
            raise LaunchError(
                f"{launcher} started this process as rank {variables.text(rank, '?')} of "
                f"{variables.text(size)} ({rank}, {size}), and megapg can't tell where its ranks "
                "meet. Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each, pass "
                "launch=megapg.launch.Launch(...), or start them with torchrun."
            )
