"""The workers of ``megapg demo rl``: actors of Ray that train, and actors of Ray that generate.

The driver calls each method on all workers of a job at the same time. Only a worker imports torch
and Megatron-core.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

import megapg
from megapg import errors
from megapg.demo.job import GPTRun, library_text
from megapg.launch import Launch
from megapg.ownership.joint import JointGroup

if TYPE_CHECKING:
    from megapg.demo.rl_models import Network, Sample

SOON = 20.0  # seconds for the other ranks to arrive
COLLECTIVES = timedelta(seconds=30)


@dataclass(frozen=True)
class Place:
    """The process of a worker."""

    process: int
    host: str
    node: str  # Ray's id of its node


class _Worker:
    """Base class of the workers: Megatron-core on the CPU, and a part in the joint group."""

    side: str  # of the joint group

    def __init__(self, run: GPTRun) -> None:
        warnings.simplefilter("ignore")  # Megatron-core's, about the CPU
        logging.getLogger("megatron").setLevel(logging.ERROR)
        from megapg.testing import megatron_on_cpu

        self._run = run
        self._joint: JointGroup | None = None
        self._kit = contextlib.ExitStack()
        self._kit.enter_context(megatron_on_cpu())

    def where(self) -> Place:
        """Return the process of this worker. It has started once it returns."""
        import ray

        return Place(os.getpid(), socket.gethostname(), ray.get_runtime_context().get_node_id())

    def join(self, store: str, sizes: Mapping[str, int], number: int) -> int:
        """Agree on the members of the joint group, all at the same time. Return its generation."""
        if self._joint is None:
            self._joint = megapg.joint_group(
                "weights",
                side=self.side,
                sizes=sizes,
                rank=number,
                store=store,
                timeout=SOON,
                collective_timeout=COLLECTIVES,
            )
        else:
            self._joint.renew(sizes, rank=number)
        return self._joint.generation

    def _groups(self) -> int:
        """Return the number of torch's process groups in this process."""
        from megapg import torch_private

        gc.collect()
        return len(torch_private.known_groups())


@dataclass(frozen=True)
class Opened:
    """The sessions of a trainer that has just opened them."""

    process: int
    rebound: int  # references in its models that lead to the new groups; 0 in a new process


@dataclass(frozen=True)
class Weights:
    """Digests of a trainer's weights."""

    actor: str  # of the whole actor
    critic: str  # of this rank's stage


class Trainer(_Worker):
    """A rank of the trainer, with an actor (``tp=2``) and a critic (``pp=2``)."""

    side = "trainer"

    def __init__(self, run: GPTRun, directory: Path) -> None:
        super().__init__(run)
        from megapg.demo import rl_models  # imports Megatron-core

        self._models, self._directory = rl_models, directory
        self._networks: list[Network] = []

    def open(self, launch: Launch, step: int) -> Opened:
        """Open the sessions, and load the checkpoint of a step. A trainer that left opens again."""
        actor = megapg.session(
            tp=2, name="actor", launch=launch, timeout=SOON, collective_timeout=COLLECTIVES
        )
        critic = megapg.session(pp=2, name="critic", timeout=SOON, collective_timeout=COLLECTIVES)
        rebound = 0
        if self._networks:
            for network, session in zip(self._networks, (actor, critic), strict=True):
                rebound += len(network.move(session).replaced)
        else:
            cut = replace(self._run, tp=2), replace(self._run, pp=2)
            self._networks = [
                self._models.Network(cut[0], actor, self._models.act),
                self._models.Network(cut[1], critic, self._models.criticise),
            ]
        if step:
            for network in self._networks:
                network.load(self._directory / network.session.name, step)
        return Opened(os.getpid(), rebound)

    def suspend(self) -> int:
        """Suspend both sessions. Return the number of their groups that are left."""
        megapg.suspend(*self._sessions)
        return self._groups() - 2  # WORLD and the joint group

    def resume(self) -> None:
        """Resume both sessions, with new groups in both models."""
        megapg.resume(*self._sessions)
        for session in self._sessions:
            session.warm_up()  # a gloo group that never connected is slow to notice a dead rank

    def refit(self) -> None:
        """Give the actor's weights to the rollouts."""
        assert self._joint is not None
        for _, weight in sorted(self._networks[0].whole().items()):
            dist.broadcast(weight, group_src=0, group=self._joint.group)

    def train(self, samples: Sequence[Sample]) -> tuple[float, float, float]:
        """Train the actor and the critic for a step. Return their losses, and the mean reward."""
        actor, critic = self._networks
        batch = self._models.microbatches(self._run, samples)
        batch = self._models.with_advantages(critic, batch)
        reward = sum(each["rewards"].sum() for each in batch) / sum(
            each["written"].sum() for each in batch
        )
        return actor.learn(batch), critic.learn(batch), float(reward)

    def save(self, step: int) -> None:
        """Save a checkpoint of both models."""
        for network in self._networks:
            network.save(self._directory / network.session.name, step)

    def leave(self) -> str:
        """Close the sessions after a rank was lost. Return the error, which names the rank."""
        actor, critic = self._sessions
        try:
            with actor, critic:  # an error closes both, without waiting for the other ranks
                actor.check(5.0, "a collective failed")
        except errors.RendezvousError as error:
            return str(error)
        return ""

    def weights(self) -> Weights:
        """Return the digests of the weights; every trainer calls it."""
        actor, critic = (self._models.digest(network.whole()) for network in self._networks)
        return Weights(actor, critic)

    def close(self) -> int:
        """Close all groups. Return the number of groups that are left."""
        self._joint.close()
        for network in reversed(self._networks):
            network.let_go()
            network.session.close()
        self._networks.clear()
        return self._groups()

    @property
    def _sessions(self) -> tuple[megapg.Session, ...]:
        return tuple(network.session for network in self._networks)


class Rollout(_Worker):
    """A worker that has the whole actor and generates samples."""

    side = "rollout"

    def __init__(self, run: GPTRun) -> None:
        super().__init__(run)
        from megapg.demo import rl_models  # imports Megatron-core

        self._models = rl_models
        self._session = megapg.session(launch=Launch.alone(), name="rollout", timeout=SOON)
        self._writer = rl_models.Writer(run, self._session, library_text())

    def generate(self, step: int, numbers: Sequence[int]) -> list[Sample]:
        """Return samples of a step."""
        return self._writer.generate(step, numbers)

    def refit(self) -> None:
        """Take the actor's weights from the trainers."""
        assert self._joint is not None
        for _, weight in sorted(self._writer.model.named_parameters()):
            dist.broadcast(weight.data, group_src=0, group=self._joint.group)

    def weights(self) -> str:
        """Return the digest of the weights."""
        return self._models.digest(dict(self._writer.model.named_parameters()))

    def close(self) -> int:
        """Close all groups. Return the number of groups that are left."""
        self._joint.close()
        del self._writer
        self._session.close()
        return self._groups()
