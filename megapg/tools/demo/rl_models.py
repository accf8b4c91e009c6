"""The models of ``megapg demo rl``, and the mathematics of a step, on one rank.

The actor writes text, and the critic estimates the reward of each byte. Actor and critic are GPTs
of Megatron-core. In a trainer they have different layouts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from megapg.collection import ProcessGroupCollection
from megapg.megatron import published
from megapg.ownership.rebind import Rebound
from megapg.ownership.session import Session
from megapg.rl.turns import Turn
from megapg.rng import seed_all
from megapg.tools.demo.gpt import (
    build_chunks,
    build_model,
    build_optimizer,
    let_go,
    mean_over_job,
    schedule,
    transformer_config,
)
from megapg.tools.demo.job import GPTRun

PROMPT = 8  # bytes of a sample that come from the text; the actor writes the others

Sample: TypeAlias = Sequence[int]
Microbatch: TypeAlias = Mapping[str, torch.Tensor]


class Network:
    """A model of the trainer on its session's groups, with optimizer, schedule and random streams.

    ``with network.turn as pg`` is a context in which Megatron-core uses these groups and streams.
    """

    def __init__(self, run: GPTRun, session: Session, forward_step: Callable[..., object]) -> None:
        self._run, self.session, self.turn = run, session, Turn(session)
        with self.turn as pg:
            seed_all(run.seed, pg)
            self.chunks = build_chunks(run, pg, pg.pp)
            self.optimizer = build_optimizer(run, self.chunks, pg)
            self.schedule = schedule(run, self.chunks, pg, forward_step)
        session.on_resume(lambda groups: self.rebind())

    def rebind(self, of: Session | None = None) -> Rebound:
        """Put the session's new groups in place of its earlier ones, or of those of a lost session.

        Raises:
            RuntimeError: a reference to an old group is left.
        """
        rebound = self.session.rebind(self.chunks, self.optimizer, self.schedule, of=of)
        if not rebound.complete:
            raise RuntimeError(f"a model still holds old groups: {rebound}")
        return rebound

    def move(self, session: Session) -> Rebound:
        """Leave a session that lost a rank for one that replaces it.

        The model stays. All ranks build the optimizer, since its constructor is a collective.
        """
        lost, self.session = self.session, session
        self.turn.session = session
        session.on_resume(lambda groups: self.rebind())
        rebound = self.rebind(of=lost)
        self.optimizer = build_optimizer(self._run, self.chunks, session.groups)
        return rebound

    def learn(self, batch: Sequence[Microbatch]) -> float:
        """Take an optimizer step. Return the mean loss, on every rank."""
        with self.turn as pg:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            reported = self.schedule(data_iterator=iter(batch))
            self.optimizer.step()
            for chunk in self.chunks:  # else this is left to the next forward pass
                chunk.start_param_sync(force_sync=True)
            return mean_over_job(reported, pg.pp, pg.dp)

    def in_checkpoint(self, directory: Path, pg: ProcessGroupCollection) -> dict[str, Any]:
        """Return arguments of ``save_checkpoint`` and ``load_checkpoint``."""
        return {
            "directory": directory / self.session.name,
            "model": self.chunks,
            "optimizer": self.optimizer,
            "pg_collection": pg,
        }

    def whole(self) -> dict[str, torch.Tensor]:
        """Return name -> whole parameter of this stage, gathered from the tensor parallel ranks."""
        pg = self.session.groups
        parameters: dict[str, torch.Tensor] = {}
        for name, parameter in self.chunks[0].module.named_parameters():
            part = parameter.detach()
            if getattr(parameter, "tensor_model_parallel", False) and pg.size("tp") > 1:
                parts = [torch.empty_like(part) for _ in range(pg.size("tp"))]
                dist.all_gather(parts, part.contiguous(), group=pg.tp)
                part = torch.cat(parts, dim=parameter.partition_dim)
            parameters[name] = part
        return parameters

    def let_go(self) -> None:
        """Clear what keeps the groups alive."""
        let_go(self.chunks)


class Writer:
    """A whole actor on one rank, which generates samples. It does not learn."""

    def __init__(self, run: GPTRun, session: Session, text: bytes) -> None:
        self._run, self._text, self._pg = run, text, session.groups
        seed_all(run.seed + 1, self._pg)  # other weights than the trainer's, until the first refit
        self.model = build_model(run, transformer_config(run), self._pg, self._pg.pp).eval()

    def generate(self, step: int, numbers: Sequence[int]) -> list[Sample]:
        """Return samples of a step. They depend on the weights, the step and their numbers only."""
        chance = [random.Random(f"{self._run.seed}/{step}/{number}") for number in numbers]
        starts = [each.randrange(len(self._text) - PROMPT) for each in chance]
        tokens = torch.tensor([list(self._text[start : start + PROMPT]) for start in starts])
        draws = [torch.Generator().manual_seed(each.getrandbits(63)) for each in chance]
        with published(self._pg), torch.no_grad():
            while tokens.shape[1] <= self._run.seq_length:
                logits = self.model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
                likely = logits[:, -1].softmax(-1)
                following = [
                    torch.multinomial(row, 1, generator=draw)
                    for row, draw in zip(likely, draws, strict=True)
                ]
                tokens = torch.cat([tokens, torch.stack(following)], dim=1)
        return [tuple(row) for row in tokens.tolist()]


# -- a step --------------------------------------------------------------------------------------


def microbatches(run: GPTRun, samples: Sequence[Sample]) -> list[Microbatch]:
    """Return the samples as microbatches, with the reward of each byte that the actor wrote.

    The reward is 1 for a small letter, else 0.
    """
    whole = torch.tensor(samples)
    tokens, labels = whole[:, :-1], whole[:, 1:]
    written = torch.arange(run.seq_length) >= PROMPT - 1
    letter = (labels >= ord("a")) & (labels <= ord("z"))
    fields = {
        "tokens": tokens,
        "labels": labels,
        "positions": torch.arange(run.seq_length).expand_as(tokens),
        "written": written.expand_as(tokens).float(),
        "rewards": (letter & written).float(),
    }
    parts = {name: torch.split(field, run.micro_batch_size) for name, field in fields.items()}
    return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]


def with_advantages(critic: Network, batch: Sequence[Microbatch]) -> list[Microbatch]:
    """Return the batch with the critic's error on each byte as its advantage, on every rank."""
    with critic.turn as pg:
        critic.chunks[0].eval()
        values = critic.schedule(
            data_iterator=iter(batch), forward_step_func=estimate, forward_only=True
        )
        critic.chunks[0].train()
        last = pg.ranks("pp")[-1]
        known = (
            torch.stack(values) if values else torch.empty(len(batch), *batch[0]["tokens"].shape)
        )
        dist.broadcast(known, last, group=pg.pp)
    return [
        {**each, "advantages": (each["rewards"] - value) * each["written"]}
        for each, value in zip(batch, known, strict=True)
    ]


def _policy_loss(batch: Microbatch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = (batch["advantages"] * losses).mean()
    return loss, loss.detach().clone()  # the schedule scales the first one in place


def _value_loss(batch: Microbatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = ((logits[..., 0] - batch["rewards"]) * batch["written"]).square().mean()
    return loss, loss.detach().clone()


def _values(batch: Microbatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = logits[..., 0].detach().clone()  # the first logit is the estimate
    return values.mean(), values


def _forward_step(
    loss: Callable[[Microbatch, torch.Tensor], object], *, labelled: bool
) -> Callable[[Iterator[Microbatch], Any], object]:
    """Return a ``forward_step_func`` for Megatron-core's schedule."""

    def forward_step(batches: Iterator[Microbatch], model: Any) -> object:
        batch = next(batches)
        labels = batch["labels"] if labelled else None
        output = model(batch["tokens"], batch["positions"], None, labels=labels)
        return output, partial(loss, batch)

    return forward_step


act = _forward_step(_policy_loss, labelled=True)  # for the actor
criticise = _forward_step(_value_loss, labelled=False)  # for the critic
estimate = _forward_step(_values, labelled=False)  # reports the critic's values


def digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names and bytes."""
    found = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        found.update(name.encode())
        found.update(parameter.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
