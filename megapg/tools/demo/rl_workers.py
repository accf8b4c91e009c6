"""The workers of ``megapg demo rl``: actors of Ray that train, and actors of Ray that generate.

The driver calls each method on all workers of a job at the same time. Only a worker imports torch
and Megatron-core.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

import megapg
from megapg import errors
from megapg.launch import Launch
from megapg.rl.joint import JointGroup
from megapg.rl.refit.exchange import RefitReport
from megapg.tools.demo.job import GPTRun, library_text

if TYPE_CHECKING:
    from megapg.tools.demo.rl_models import Network, Sample

SOON = 20.0  # seconds for the other ranks to arrive
COLLECTIVES = timedelta(seconds=30)


@dataclass(frozen=True)
class State:
    """A worker, and digests of its weights."""

    process: int
    opened: int  # how often it opened its sessions
    actor: str  # of the whole actor
    critic: str = ""  # of this rank's stage; a rollout has none


class _Worker:
    """Base class of the workers: Megatron-core on the CPU, and a part in the joint group."""

    side: str  # of the joint group

    def __init__(self, run: GPTRun) -> None:
        warnings.simplefilter("ignore")  # Megatron-core's, about the CPU
        logging.getLogger("megatron").setLevel(logging.ERROR)
        from megapg.testing import megatron_on_cpu

        self._run = run
        self._opened = 0
        self._joint: JointGroup | None = None
        self._kit = contextlib.ExitStack()
        self._kit.enter_context(megatron_on_cpu())

    def process(self) -> int:
        """Return the process of this worker, once it has started."""
        return os.getpid()

    def join(self, store: str, sizes: Mapping[str, int], number: int) -> int:
        """Agree on the members of the joint group, and plan the refit. Return the generation."""
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
        gives, takes = self._slices()
        self._refit = megapg.Refit(self._joint.group, gives=gives, takes=takes)
        return self._joint.generation

    def refit(self) -> RefitReport:
        """Move the actor's weights from the trainers to the rollouts."""
        return self._refit.run()

    def _slices(self) -> tuple[megapg.Slices | None, megapg.Slices | None]:
        """Return the weights that this worker gives, and those that it takes."""
        raise NotImplementedError

    def _leave_joint_group(self) -> None:
        del self._refit
        if self._joint is not None:
            self._joint.close()

    def _groups(self) -> int:
        """Return the number of torch's process groups in this process."""
        from megapg import torch_private

        gc.collect()
        return len(torch_private.known_groups())


class Trainer(_Worker):
    """A rank of the trainer, with an actor (``tp=2``) and a critic (``pp=2``)."""

    side = "trainer"

    def __init__(self, run: GPTRun, directory: Path) -> None:
        super().__init__(run)
        from megapg.tools.demo import rl_models  # imports Megatron-core

        self._models, self._directory = rl_models, directory
        self._networks: list[Network] = []

    def open(self, launch: Launch, step: int) -> int:
        """Open the sessions, and load the checkpoint of a step.

        A trainer that lost its sessions keeps its models. Return the number of references in them
        that lead to the new groups.
        """
        self._opened += 1
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
                with network.turn as pg:
                    megapg.load_checkpoint(
                        **network.in_checkpoint(self._directory, pg), iteration=step
                    )
        return rebound

    def suspend(self) -> int:
        """Suspend both sessions. Return the number of their groups that are left."""
        megapg.suspend(*self._sessions)
        return self._groups() - 2  # WORLD and the joint group

    def resume(self) -> None:
        """Resume both sessions, with new groups in both models."""
        megapg.resume(*self._sessions)
        for session in self._sessions:
            session.warm_up()  # a gloo group that never connected is slow to notice a dead rank

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
            with network.turn as pg:
                megapg.save_checkpoint(**network.in_checkpoint(self._directory, pg), iteration=step)

    def leave(self) -> str:
        """Close the sessions after a rank was lost. Return the error, which names the rank."""
        actor, critic = self._sessions
        try:
            actor.check(5.0, "a collective failed")
        except errors.RendezvousError as error:
            for session in (critic, actor):
                session.close(error)  # waits for no other rank
            return str(error)
        return ""

    def state(self) -> State:
        """Return the state of this trainer; all trainers call it."""
        actor, critic = (self._models.digest(network.whole()) for network in self._networks)
        return State(os.getpid(), self._opened, actor, critic)

    def close(self) -> int:
        """Close all groups. Return the number of groups that are left."""
        self._leave_joint_group()
        for network in reversed(self._networks):
            network.let_go()
            network.session.close()
        self._networks.clear()
        return self._groups()

    @override
    def _slices(self) -> tuple[megapg.Slices, None]:
        actor = self._networks[0]
        return megapg.slices_of(actor.chunks, pg_collection=actor.session.groups), None

    @property
    def _sessions(self) -> tuple[megapg.Session, ...]:
        return tuple(network.session for network in self._networks)


class Rollout(_Worker):
    """A worker that has the whole actor and generates samples."""

    side = "rollout"

    def __init__(self, run: GPTRun) -> None:
        super().__init__(run)
        from megapg.tools.demo import rl_models  # imports Megatron-core

        self._models = rl_models
        self._session = megapg.session(launch=Launch.alone(), name="rollout", timeout=SOON)
        self._writer = rl_models.Writer(run, self._session, library_text())

    def generate(self, step: int, numbers: Sequence[int]) -> list[Sample]:
        """Return samples of a step."""
        return self._writer.generate(step, numbers)

    def state(self) -> State:
        """Return the state of this rollout."""
        actor = self._models.digest(dict(self._writer.model.named_parameters()))
        return State(os.getpid(), self._opened, actor)

    def close(self) -> int:
        """Close all groups. Return the number of groups that are left."""
        self._leave_joint_group()
        del self._writer
        self._session.close()
        return self._groups()

    @override
    def _slices(self) -> tuple[None, megapg.Slices]:
        pg = self._session.groups
        return None, megapg.slices_of(self._writer.model, pg_collection=pg)
