"""The driver of ``megapg demo rl``: a cluster of Ray, the loop over the steps, and the faults."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

import megapg.ray
from megapg.demo.job import GPTRun
from megapg.demo.rl_verdict import Left, Restarted, Story, judge_rl
from megapg.demo.rl_workers import Opened, Place, Rollout, Trainer
from megapg.demo.show import verdict_table
from megapg.launch.environment import overridden
from megapg.testing.agreement.entry import ON_CPUS

# Not tied: a restarted trainer builds its models alone.
RUN = GPTRun(layers=2, seq_length=32, micro_batch_size=4, num_microbatches=2, steps=6, tied=False)
WORKERS = 2  # trainers, and rollouts
KILL_ROLLOUT, KILL_TRAINER = 1, 3  # in these steps
VICTIM = 1  # of the workers of a job
DEADLINE = 90.0  # seconds for one call on all workers
NODE = {"num_cpus": WORKERS, "object_store_memory": 80 * 2**20, "include_dashboard": False}

Say: TypeAlias = Callable[[str], None]


def show_rl(console: Console) -> bool:
    """Run the demo and show it. True if every row of the verdict held.

    Raises:
        RayError, GetTimeoutError: a worker failed or did not answer. Nothing is left.
    """
    begin = time.monotonic()

    def say(text: str) -> None:
        console.print(
            f"[dim]{time.monotonic() - begin:4.0f} s[/]  {text}", highlight=False, soft_wrap=True
        )

    logging.getLogger("ray").setLevel(logging.ERROR)
    console.print(
        "[bold]megapg demo rl[/]: reinforcement learning on a local Ray cluster\n"
        "each step: refit the rollouts, suspend both sessions, generate, resume, train, save\n"
    )
    before = _children()
    with _cluster(say) as ports:
        stories = []
        for title, faults in (("without faults", False), ("with faults", True)):
            say(f"[bold]a run {title}[/]: starting {WORKERS} trainers and {WORKERS} rollouts")
            with tempfile.TemporaryDirectory(prefix="megapg-demo-") as directory:
                job = Job(say, Path(directory), ports)
                if not faults:
                    console.print(job.picture())
                stories.append(job.train(faults=faults))
        actors = len(ray.util.list_named_actors())
    left = Left(actors, _alive(before), tuple(filter(_open, ports)))
    console.print(verdict_table(rows := list(judge_rl(*stories, left))))
    return all(row.held for row in rows)


@contextlib.contextmanager
def _cluster(say: Say) -> Iterator[list[int]]:
    """Context of a cluster of two nodes. Return its ports; the caller may add more."""
    environment = {
        **ON_CPUS,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(),  # else Ray writes one to the home directory
    }
    with (
        overridden(environment),
        tempfile.TemporaryDirectory(prefix="megapg-ray-", dir="/tmp") as files,  # paths stay short
    ):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**NODE, "temp_dir": files, "resources": {"trainer": WORKERS}},
        )
        try:
            cluster.add_node(**NODE, resources={"rollout": WORKERS})
            ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
            say(f"a Ray {ray.__version__} cluster runs: one node for trainers, one for rollouts")
            named = ("NodeManagerPort", "ObjectManagerPort", "RuntimeEnvAgentPort")
            ports = [node.get(name, 0) for node in ray.nodes() for name in named]
            yield [int(cluster.address.rpartition(":")[2]), *(port for port in ports if port > 0)]
        finally:
            ray.shutdown()
            cluster.shutdown()


class Job:
    """The workers of one run, and the loop over its steps.

    Args:
        say: prints a line.
        directory: for checkpoints.
        ports: gets the ports that this job uses.
    """

    def __init__(self, say: Say, directory: Path, ports: list[int]) -> None:
        self._say, self._ports = say, ports
        self._story = Story()
        self._count = 0
        self._trainers = [self._start(Trainer, RUN, directory) for _ in range(WORKERS)]
        self._rollouts = [self._start(Rollout, RUN) for _ in range(WORKERS)]
        self._places = _all([*self._trainers, *self._rollouts], "where")
        self._open(0)

    def train(self, *, faults: bool) -> Story:
        """Train all steps, and close."""
        story = self._story
        for step in range(RUN.steps):
            self._refit()
            story.suspended.append(tuple(_all(self._trainers, "suspend")))
            samples = self._generate(step, kill=faults and step == KILL_ROLLOUT)
            _all(self._trainers, "resume")
            if faults and step == KILL_TRAINER:
                self._lose_a_trainer(step, samples)
            (actor, critic, reward), *others = _all(self._trainers, "train", samples)
            if any(other != (actor, critic, reward) for other in others):
                raise RuntimeError(f"trainers disagree on the losses: {others}")
            story.losses.append((actor, critic))
            _all(self._trainers, "save", step + 1)
            self._say(
                f"step {step + 1} of {RUN.steps}: actor loss {actor:.4f}, "
                f"critic loss {critic:.4f}, reward {reward:.2f}"
            )
        self._refit()
        story.weights = _all(self._trainers, "weights")
        story.groups_left = sum(_all([*self._trainers, *self._rollouts], "close"))
        for actor in (*self._trainers, *self._rollouts):
            ray.kill(actor)
        return story

    def picture(self) -> Table:
        """Return a table of the workers: where they are, and what they have."""
        table = Table("worker", "node", "process", "actor", "critic", "", title_justify="left")
        nodes = list(dict.fromkeys(place.node for place in self._places))
        for index, place in enumerate(self._places):
            number = index % WORKERS
            mine = (
                (f"trainer {number}", f"tp rank {number} of 2", f"pp stage {number} of 2", "gives")
                if index < WORKERS
                else (f"rollout {number}", "whole", "", "takes")
            )
            where = str(nodes.index(place.node)), str(place.process)
            table.add_row(mine[0], *where, *mine[1:])
        return table

    def _start(self, worker: type, *arguments: object) -> ActorHandle:
        kind = worker.__name__.lower()
        self._count += 1
        options = {
            "name": f"{kind} {self._count}",
            "num_cpus": 0,
            "resources": {kind: 1},
            "max_restarts": 1 if worker is Trainer else 0,
        }
        return ray.remote(worker).options(**options).remote(*arguments)  # type: ignore[no-any-return]

    def _open(self, step: int) -> list[Opened]:
        """Open the sessions of the trainers, at the checkpoint of a step."""
        launches = megapg.ray.launches(self._trainers)
        self._ports.append(launches[0].port)
        pairs = zip(self._trainers, launches, strict=True)
        return _results([trainer.open.remote(launch, step) for trainer, launch in pairs])

    def _refit(self) -> None:
        """Bring the actor's weights to the rollouts, and compare digests."""
        ours = _all(self._trainers, "weights")[0].actor
        self._story.refits.append((ours, tuple(_all(self._rollouts, "weights"))))

    def _generate(self, step: int, *, kill: bool) -> list[Any]:
        """Return the samples of a step. A rollout that still lives takes over for one that died."""
        share = RUN.micro_batch_size * RUN.num_microbatches // WORKERS
        shares = [range(share * each, share * (each + 1)) for each in range(WORKERS)]
        calls = [
            rollout.generate.remote(step, list(numbers))
            for rollout, numbers in zip(self._rollouts, shares, strict=True)
        ]
        if not kill:
            return [*chain(*_results(calls))]
        ray.kill(self._rollouts[VICTIM])
        self._say(f"[yellow]rollout {VICTIM} is killed while it generates[/]")
        parts = []
        for call, numbers in zip(calls, shares, strict=True):
            try:
                parts.append(_results([call])[0])
            except ray.exceptions.RayActorError:
                parts += _all([self._rollouts[1 - VICTIM]], "generate", step, list(numbers))
                self._say("the other rollout generates its samples; Ray starts a new one")
        self._rollouts[VICTIM] = self._start(Rollout, RUN)
        return [*chain(*parts)]

    def _lose_a_trainer(self, step: int, samples: list[Any]) -> None:
        """Kill a trainer while it trains, and return to the last checkpoint."""
        before = self._places[VICTIM].process
        calls = [trainer.train.remote(samples) for trainer in self._trainers]
        ray.kill(self._trainers[VICTIM], no_restart=False)
        self._say(f"[yellow]trainer {VICTIM} is killed while it trains[/]")
        for call in calls:
            with contextlib.suppress(ray.exceptions.RayError):
                _results([call])
        (error,) = _all([self._trainers[1 - VICTIM]], "leave")
        self._say(f"the other trainer's error: {error}")
        after = _restarted(self._trainers[VICTIM])
        opened = self._open(step)
        self._say(
            f"Ray restarted it. Sessions open again: generation {opened[0].generations[0]}, "
            f"{opened[1 - VICTIM].rebound} references rebound, checkpoint of step {step}"
        )
        self._story.restarted = Restarted(step, VICTIM, error, after != before, tuple(opened))


def _all(actors: Sequence[ActorHandle], method: str, *arguments: object) -> list[Any]:
    """Return the results of a method on all actors."""
    return _results([getattr(actor, method).remote(*arguments) for actor in actors])


def _results(calls: list[Any]) -> list[Any]:
    return ray.get(calls, timeout=DEADLINE)  # type: ignore[no-any-return]


def _restarted(actor: ActorHandle) -> int:
    """Wait until Ray has restarted an actor. Return its process."""
    until = time.monotonic() + DEADLINE
    while True:
        try:
            place: Place = _all([actor], "where")[0]
        except ray.exceptions.RayActorError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
        else:
            return place.process


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _alive(before: set[psutil.Process]) -> int:
    """Return the number of processes that this one started since then and that are left."""
    _, alive = psutil.wait_procs(_children() - before, timeout=10)
    return len(alive)


def _open(port: int) -> bool:
    """True if a process listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
