"""The driver of ``megapg demo rl``: a cluster of Ray, the loop over the steps, and the faults."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import ray
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from rich.console import Console
from rich.table import Table

import megapg.rl.ray
from megapg.launch.environment import overridden
from megapg.tools.demo.job import GPTRun
from megapg.tools.demo.rl_verdict import Left, Refitted, Story, judge_rl
from megapg.tools.demo.rl_workers import Rollout, Trainer
from megapg.tools.demo.show import verdict_table
from megapg.tools.parity.entry import ON_CPUS

# Tied weights need other ranks when a model is built, and a restarted trainer builds it alone.
RUN = GPTRun(layers=2, seq_length=32, micro_batch_size=4, num_microbatches=2, steps=6, tied=False)
WORKERS = 2  # trainers, and rollouts
KILL_ROLLOUT, ADMIT_ROLLOUT, KILL_TRAINER = 1, 3, 4  # in these steps
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
        "each step: refit the rollouts, suspend both sessions, generate, resume, train, save\n",
        soft_wrap=True,
    )
    before = _children()
    with _cluster(say) as ports:
        stories: list[Story] = []
        for title, faults in (("without faults", False), ("with faults", True)):
            say(f"[bold]a run {title}[/]: starting {WORKERS} trainers and {WORKERS} rollouts")
            with (
                tempfile.TemporaryDirectory(prefix="megapg-demo-") as directory,
                megapg.SharedStore() as store,
            ):
                ports.append(int(store.address.rpartition(":")[2]))
                job = Job(say, Path(directory), store.address, ports)
                if not faults:
                    console.print(job.picture())
                stories.append(job.train(faults=faults))
        actors = _actors()
    left = Left(actors, _alive(before), sum(map(_listens, ports)))
    console.print(verdict_table(rows := list(judge_rl(stories[0], stories[1], left))))
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
        tempfile.TemporaryDirectory(prefix="megapg-ray-", dir="/tmp") as files,  # paths stay short
        # With Ray's argument temp_dir, Ray writes a file to its default folder nevertheless.
        overridden({**environment, "RAY_TMPDIR": files}),
    ):
        cluster = Cluster(
            initialize_head=True,
            head_node_args={**NODE, "resources": {"trainer": WORKERS}},
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
        store: address of the store of the joint group.
        ports: gets the ports that this job uses.
    """

    def __init__(self, say: Say, directory: Path, store: str, ports: list[int]) -> None:
        self._say, self._store, self._ports = say, store, ports
        self._story = Story()
        self._count = 0
        self._changed = True  # members of the joint group, since the last agreement
        self._new: ActorHandle | None = None  # a rollout that has not joined yet
        self._trainers = [self._start(Trainer, RUN, directory) for _ in range(WORKERS)]
        self._rollouts = [self._start(Rollout, RUN) for _ in range(WORKERS)]
        self._processes = _all([*self._trainers, *self._rollouts], "process")
        self._open(0)

    def train(self, *, faults: bool) -> Story:
        """Train all steps, and close."""
        story = self._story
        for step in range(RUN.steps):
            if faults and step == ADMIT_ROLLOUT:
                self._admit()
            self._refit()
            story.suspended += _all(self._trainers, "suspend")
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
        story.groups = sum(_all([*self._trainers, *self._rollouts], "close"))
        for actor in (*self._trainers, *self._rollouts):
            ray.kill(actor)
        return story

    def picture(self) -> Table:
        """Return a table of the workers: node, process and models of each."""
        table = Table("worker", "node", "process", "actor", "critic")
        for index, process in enumerate(self._processes):
            node, number = divmod(index, WORKERS)
            kind, actor, critic = (
                ("trainer", f"tp rank {number} of {WORKERS}", f"pp stage {number} of {WORKERS}"),
                ("rollout", "whole, not trained", "none"),
            )[node]
            table.add_row(f"{kind} {number}", str(node), str(process), actor, critic)
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
        return ray.remote(worker).options(**options).remote(*arguments)

    def _open(self, step: int) -> list[int]:
        """Open the sessions of the trainers, at the checkpoint of a step."""
        launches = megapg.rl.ray.launches(self._trainers)
        self._ports.append(launches[0].port)
        pairs = zip(self._trainers, launches, strict=True)
        return _results([trainer.open.remote(launch, step) for trainer, launch in pairs])

    def _refit(self) -> None:
        """Move the actor's weights to the rollouts, and compare digests."""
        sizes = {"trainer": len(self._trainers), "rollout": len(self._rollouts)}
        if self._changed:
            sides = chain(enumerate(self._trainers), enumerate(self._rollouts))
            joined = [actor.join.remote(self._store, sizes, number) for number, actor in sides]
            generation = _results(joined)[0]
            self._say(f"joint group, generation {generation}: {_said(sizes)}")
            self._changed = False
        _all([*self._trainers, *self._rollouts], "refit")
        trainers, rollouts = _all(self._trainers, "state"), _all(self._rollouts, "state")
        self._story.refits.append(Refitted(tuple(trainers), tuple(rollouts)))

    def _generate(self, step: int, *, kill: bool) -> list[Any]:
        """Return the samples of a step. The other rollouts take over for one that died."""
        share = RUN.micro_batch_size * RUN.num_microbatches // WORKERS
        shares = [list(range(share * each, share * (each + 1))) for each in range(WORKERS)]

        def ask(number: int) -> Any:
            rollout = self._rollouts[number % len(self._rollouts)]
            return rollout.generate.remote(step, shares[number])

        calls = [ask(number) for number in range(WORKERS)]
        if kill:
            ray.kill(self._rollouts.pop(VICTIM))
            self._say(f"[yellow]rollout {VICTIM} is killed while it generates[/]")
            with contextlib.suppress(ray.exceptions.RayActorError):
                _results(calls)
            self._say("the other rollout generates its samples; a new one starts")
            self._changed, self._new = True, self._start(Rollout, RUN)
            calls = [ask(number) for number in range(WORKERS)]
        return [*chain(*_results(calls))]

    def _admit(self) -> None:
        """Let the new rollout join at the next agreement."""
        if self._new is not None:
            _all([self._new], "process")
            self._rollouts.append(self._new)
            self._changed, self._new = True, None

    def _lose_a_trainer(self, step: int, samples: list[Any]) -> None:
        """Kill a trainer while it trains, and return to the last checkpoint."""
        victim, other = self._trainers[VICTIM], self._trainers[1 - VICTIM]
        calls = [trainer.train.remote(samples) for trainer in self._trainers]
        ray.kill(victim, no_restart=False)
        self._say(f"[yellow]trainer {VICTIM} is killed while it trains[/]")
        for call in calls:
            with contextlib.suppress(ray.exceptions.RayError):
                _results([call])
        (self._story.error,) = _all([other], "leave")
        self._say(f"the other trainer: {self._story.error}")
        _await_restart(victim)
        self._story.rebound = self._open(step)[1 - VICTIM]
        self._changed = True
        self._say(
            f"Ray restarted it; both sessions open again, {self._story.rebound} references "
            f"rebound, checkpoint of step {step} loaded"
        )


def _all(actors: Sequence[ActorHandle], method: str, *arguments: object) -> list[Any]:
    """Return the results of a method on all actors."""
    return _results([getattr(actor, method).remote(*arguments) for actor in actors])


def _results(calls: list[Any]) -> list[Any]:
    return ray.get(calls, timeout=DEADLINE)  # type: ignore[no-any-return]


def _said(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"{size} {side}{'s' * (size > 1)}" for side, size in sizes.items())


def _await_restart(actor: ActorHandle) -> None:
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        with contextlib.suppress(ray.exceptions.RayActorError):
            _all([actor], "process")
            return
        time.sleep(0.2)


def _actors() -> int:
    """Return the number of actors that are left. Ray takes a moment to end those it killed."""
    until = time.monotonic() + 10
    while (left := len(ray.util.list_named_actors())) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _alive(before: set[psutil.Process]) -> int:
    """Return the number of processes that this one started since then and that are left."""
    _, alive = psutil.wait_procs(_children() - before, timeout=10)
    return len(alive)


def _listens(port: int) -> bool:
    """True if a process listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
