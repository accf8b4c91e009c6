"""Launchers and platforms that megapg recognises, but whose ranks it can't connect."""

from __future__ import annotations

import json
from dataclasses import dataclass

from megapg.errors import LaunchError
from megapg.launch.environment import Variables
from megapg.launch.launcher import Launcher


@dataclass(frozen=True)
class Other:
    """A launcher or platform, and the variables that show a process to be one of several.

    Each attribute is the name of a variable, or empty.
    """

    name: str  # of the launcher or platform, for messages; not a variable
    index: str  # the index of this process
    # the number of processes; the values of all names that match a ``*`` are added
    count: str = ""
    local_index: str = ""  # the index of this process on its host
    local_count: str = ""  # the number of processes on its host
    listing: str = ""  # all processes: a JSON list, or words separated by commas, spaces or lines
    # True if index, count and listing count hosts, each of which may run several ranks
    hosts: bool = False
    remedy: str = "Start them with torchrun"  # advice for the message

    @property
    def by_hand(self) -> str:
        """The variables to set in each process."""
        if self.hosts or not self.local_index:
            return "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        return (
            f"RANK=${self.index}, WORLD_SIZE=${self.count}, LOCAL_RANK=${self.local_index}, "
            "MASTER_ADDR and MASTER_PORT"
        )


def _ranks(name: str, prefix: str) -> Other:
    """Return a launcher whose variables have the usual names after a prefix."""
    rank, size, local_rank, local_size = (
        f"{prefix}_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    return Other(name, rank, size, local_rank, local_size)


def _hosts(
    name: str, index: str, count: str, address: str, gpus: str = "GPUS", listing: str = ""
) -> Other:
    """Return a platform that starts one process per host, where the user can start torchrun."""
    remedy = (
        f"Start torchrun in each: torchrun --nnodes={f'${count}' if count else 'PODS'} "
        f"--node-rank=${index} --nproc-per-node={gpus} --master-addr={address} "
        "--master-port=29500 ..."
    )
    return Other(name, index, count, listing=listing, hosts=True, remedy=remedy)


# From the documentation and sources of the launchers and platforms.
_OTHERS = (
    Other("Cray PALS", "PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"),
    _ranks("MVAPICH", "MV2_COMM_WORLD"),
    _ranks("LSF's jsrun", "JSM_NAMESPACE"),
    Other("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Other(
        "MPICH, Intel MPI or the like", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    ),
    _ranks("Horovod", "HOROVOD"),
    Other("PMIx", "PMIX_RANK"),
    Other("a worker group on Ray", "", local_count="RAY_LOCAL_WORLD_SIZE"),
    _hosts(
        "SkyPilot",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_NODES",
        '$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
        "$SKYPILOT_NUM_GPUS_PER_NODE",
        "SKYPILOT_NODE_IPS",
    ),
    Other(
        "SageMaker",
        "SM_CURRENT_HOST",
        listing="SM_HOSTS",
        hosts=True,
        remedy="Let SageMaker start torchrun (distribution={'torch_distributed': {'enabled': "
        "True}})",
    ),
    Other(
        "Kubeflow",
        "PET_NODE_RANK",
        "PET_NNODES",
        local_count="PET_NPROC_PER_NODE",
        hosts=True,
        remedy="Start torchrun in each, which reads the PET_ variables",
    ),
    Other(
        "Volcano",
        "VC_TASK_INDEX",
        "VC_*_NUM",
        hosts=True,
        remedy="Give the job Volcano's pytorch plugin",
    ),
    _hosts("a LeaderWorkerSet", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "$LWS_LEADER_ADDRESS"),
    _hosts("AWS Batch", "AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES", "MAIN_NODE"),
    _hosts(
        "dstack",
        "DSTACK_NODE_RANK",
        "DSTACK_NODES_NUM",
        "$DSTACK_MASTER_NODE_IP",
        "$DSTACK_GPUS_PER_NODE",
        "DSTACK_NODES_IPS",
    ),
    # A job of a single pod has an index too, and Kubernetes does not give the number of pods. So
    # this row is last: another platform may give the number.
    _hosts("an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", "", "JOB-0.SERVICE"),
)


def refuse_within(variables: Variables, outer: Launcher) -> None:
    """Raise a LaunchError if a known launcher started this process inside a task of ``outer``.

    Intel MPI, MPICH and Flux start one daemon per node with ``srun``, and their ranks inherit the
    daemon's variables. Without this check, several ranks would take themselves for one task.
    """
    for other in _OTHERS:
        if other.hosts or not (other.index and other.count):
            continue
        names = (other.index, other.count)
        said = dict(zip(names, (outer.rank, outer.world_size), strict=True))
        if any(variables.number(name, value) != value for name, value in said.items()):
            given = ", ".join(f"{n}={variables.text(n)}" for n in variables.among(names))
            raise LaunchError(
                f"two sources contradict each other: {other.name} has {given}, but {outer.name} "
                f"has {outer.names[0]}={outer.rank}, {outer.names[1]}={outer.world_size}. Start "
                f"the ranks with srun itself or with torchrun; or unset {', '.join(names)} to let "
                f"{outer.name} speak."
            )


def refuse_unknown(variables: Variables) -> None:
    """Raise a LaunchError if a known launcher started this process as one of several.

    Without this check, every rank of such a job would run as a process alone. A process with an
    index but without a number of processes counts as one of several, because a process that is
    started once gets no index.
    """
    found = [(other, _how_many(other, variables)) for other in _OTHERS]
    alone = {other.hosts for other, count in found if count == 1}  # of ranks, or of hosts
    for other, count in found:
        index = variables.plain(other.index)
        excused = count == 1 or (other.hosts in alone and index == "0")
        # A count that is no number, such as 1:4 of an elastic job, says that there may be several.
        counted = any(map(variables.plain, variables.like(other.count)))
        if excused or (count is None and not index and not counted):
            continue
        names = [other.index, *variables.like(other.count), other.listing, other.local_count]
        given = ", ".join(name for name in names if variables.plain(name))
        raise LaunchError(
            f"{other.name} started this process {'on host' if other.hosts else 'as rank'} "
            f"{index or '?'} of {count or 'an unknown number'} ({given}), and megapg can't tell "
            "which rank it is and where the ranks meet: each would train alone. "
            f"{other.remedy}; or set {other.by_hand} in each. If alone is meant, pass "
            "launch=megapg.Launch.alone()."
        )


def local_rank(variables: Variables, rank: int, world_size: int) -> int | None:
    """Return the index of a rank on its host if ``LOCAL_RANK`` is not set; None if unknown.

    The index is known if a variable gives it, if there is one rank per host, or if all ranks are on
    this host. The number of ranks per host is not enough, because the ranks of a host need not be
    consecutive.

    Raises:
        LaunchError: only the number of ranks per host is known.
    """
    shared = [("LOCAL_WORLD_SIZE", variables.whole("LOCAL_WORLD_SIZE"))]
    for other in _OTHERS:
        ours = {other.index: rank, other.count: world_size}
        if not other.hosts and all(variables.whole(n) in (None, v) for n, v in ours.items()):
            said = variables.whole(other.local_index)
            if said is not None:
                return said
        if other.hosts and _how_many(other, variables) == world_size:
            return 0
        shared.append((other.local_count, variables.whole(other.local_count)))
    for name, here in shared:
        if here in (1, world_size):
            return 0 if here == 1 else rank
        if here is not None:
            raise LaunchError(
                f"{name}={here} of {world_size} ranks share a host, and LOCAL_RANK is not set, "
                "which says which accelerator each of them takes. Set it in each, counting from 0 "
                "on each host; or start with torchrun."
            )
    return None


def _how_many(other: Other, variables: Variables) -> int | None:
    """Return the number of processes (or hosts) of a row; None if unknown."""
    counts = [variables.whole(name) for name in variables.like(other.count)]
    numbers = [count for count in counts if count is not None]
    if numbers and len(numbers) == len(counts):
        return sum(numbers)
    if listed := variables.plain(other.listing):
        return _length(listed)
    here = None if other.hosts else variables.whole(other.local_count)
    return here if here is not None and here > 1 else None


def _length(text: str) -> int:
    try:
        found = json.loads(text)
    except ValueError:
        found = text.replace(",", " ").split()
    return len(found) if isinstance(found, list) else 1
