"""SLURM: the tasks of ``srun``, and shells in an allocation, which are not tasks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from megapg.errors import LaunchError
from megapg.launch.derived_port import port_for
from megapg.launch.environment import Variables
from megapg.launch.launcher import Launcher, Place
from megapg.launch.process import Launch
from megapg.launch.slurm_nodes import names as names_of_nodes

# From here on, SLURM's step numbers stand for the batch script, an interactive shell and others
# that are no tasks.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class Slurm(Launcher):
    """A task of ``srun``.

    Rank 0 is on the first node of the step. The port depends on job, step and restarts, so that two
    steps of a job do not meet.
    """

    name = "SLURM"
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    also = ("SLURM_STEP_ID", "SLURM_JOB_ID")

    @classmethod
    @override
    def detect(cls, variables: Variables) -> Self | None:
        step = variables.maybe("SLURM_STEP_ID")
        if step is None or step >= _FIRST_SPECIAL_STEP:
            return None
        return super().detect(variables)

    @override
    def launch(self, place: Place) -> Launch:
        job, step = self.variables.text("SLURM_JOB_ID"), self.variables.number("SLURM_STEP_ID")
        restarts = self.variables.number("SLURM_RESTART_COUNT", 0)
        tasks = self._tasks()
        node = self.variables.number("SLURM_NODEID", 0)
        alone = self.variables.number("SLURM_STEP_NUM_NODES", 1) == 1
        address, nodes = self._alone(place) if alone else self._among_nodes(place)
        return Launch(
            launcher=self.name,
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            local_world_size=tasks[node] if node < len(tasks) else None,
            address=address,
            port=port_for(f"slurm {job} {restarts}", step) if place.port is None else place.port,
            attempt=restarts,
            job=f"slurm {job}.{step}",
            hosts=self._hosts(nodes, tasks),
            origin=place.origin(
                "the only node" if alone else "first node of SLURM_STEP_NODELIST",
                "port from SLURM_JOB_ID and SLURM_STEP_ID",
            ),
        )

    def _alone(self, place: Place) -> tuple[str, list[str]]:
        """Return the address for the tasks of a single node, and the names of all nodes."""
        node = self.variables.text("SLURMD_NODENAME", "")
        if self.world_size == 1:
            # a single rank needs no port, which another job on this node could take
            return "", [node]
        return place.address or "127.0.0.1", [node]

    def _among_nodes(self, place: Place) -> tuple[str, list[str]]:
        """Return the address for the tasks of several nodes, and the names of all nodes."""
        if place.address is None:
            nodes = self._nodes()
            return place.address_of(nodes[0]), nodes
        with contextlib.suppress(LaunchError):  # only names, for messages
            return place.address, self._nodes()
        return place.address, []

    def _nodes(self) -> list[str]:
        name = "SLURM_STEP_NODELIST"
        count = self.variables.number("SLURM_STEP_NUM_NODES")
        return names_of_nodes(self.variables.text(name), count, name)

    def _tasks(self) -> list[int]:
        """Return the number of tasks on each node; empty if unknown."""
        text = self.variables.text("SLURM_STEP_TASKS_PER_NODE", "")
        return [
            int(tasks)
            for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
            for _ in range(int(nodes or 1))
        ]

    def _hosts(self, nodes: Sequence[str], tasks: Sequence[int]) -> Sequence[str]:
        """Return rank -> node name; empty if the distribution of tasks is unknown."""
        kind = self.variables.text("SLURM_DISTRIBUTION", "block").partition(":")[0]
        dealt = _DISTRIBUTIONS.get(kind)
        if dealt is None or len(nodes) != len(tasks):
            return ()
        hosts = [nodes[node] for node in dealt(tasks)]
        mine = self.variables.text("SLURMD_NODENAME", "")
        right = len(hosts) == self.world_size and hosts[self.rank] == mine
        return tuple(hosts) if right else ()


def refuse_shell(variables: Variables) -> None:
    """Raise a LaunchError in the shell of ``salloc`` or ``sbatch`` if it is for several tasks.

    In a job of one task, the script is the only process and needs no ``srun``.
    """
    if "SLURM_JOB_ID" not in variables:
        return
    nodes = variables.number("SLURM_JOB_NUM_NODES", 1)
    tasks = variables.number("SLURM_NTASKS", nodes * variables.number("SLURM_NTASKS_PER_NODE", 1))
    if tasks > 1:
        job = variables.text("SLURM_JOB_ID")
        room = f"{tasks} tasks on {nodes} node{'s' if nodes > 1 else ''}"
        raise LaunchError(
            f"this process is in SLURM's job {job}, which has room for {room}, but it is none of "
            "them: the shell of salloc or sbatch started it. Start it with srun, or with torchrun; "
            "`srun -n1` makes it a process alone, as does launch=megapg.Launch.alone()."
        )


def _block(tasks: Sequence[int]) -> list[int]:
    return [node for node, count in enumerate(tasks) for _ in range(count)]


def _cyclic(tasks: Sequence[int]) -> list[int]:
    return [
        node
        for turn in range(max(tasks, default=0))
        for node, count in enumerate(tasks)
        if turn < count
    ]


# SLURM's distribution of tasks over nodes -> function from tasks per node to the node of each rank.
_DISTRIBUTIONS: Mapping[str, Callable[[Sequence[int]], list[int]]] = {
    "block": _block,
    "cyclic": _cyclic,
}
