"""The verdict of ``megapg demo rl``. Every row is computed from the reports of the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megapg.tools.demo.rl_workers import State
from megapg.tools.demo.verdict import Row


@dataclass(frozen=True)
class Refitted:
    """The workers after a refit, in the order of their ranks."""

    trainers: tuple[State, ...]
    rollouts: tuple[State, ...]


@dataclass
class Story:
    """The reports of one run."""

    losses: list[tuple[float, float]] = field(default_factory=list)  # actor and critic, by step
    refits: list[Refitted] = field(default_factory=list)  # before each step, and after the last
    # groups of suspended sessions in a trainer, by step and trainer
    suspended: list[int] = field(default_factory=list)
    error: str = ""  # of the trainers that survived
    rebound: int = 0  # references that lead to new groups in the trainers that survived
    groups: int = 0  # groups that the workers had after they closed


@dataclass(frozen=True)
class Left:
    """The number of things that are left after the cluster was shut down."""

    actors: int
    processes: int
    ports: int


def judge_rl(calm: Story, faulty: Story, left: Left) -> Iterator[Row]:
    """Yield the verdict on a run without faults and one with faults."""
    steps, first, last = len(calm.losses), faulty.losses[0], faulty.losses[-1]
    same = sum(one == other for one, other in zip(calm.losses, faulty.losses, strict=False))
    yield Row(
        "losses of actor and critic equal a run without faults, bit for bit",
        same == steps == len(faulty.losses),
        f"{same} of {steps} steps; actor {first[0]:.4f} to {last[0]:.4f}, "
        f"critic {first[1]:.4f} to {last[1]:.4f}",
    )
    ends = list(zip(calm.refits[-1].trainers, faulty.refits[-1].trainers, strict=True))
    same = sum((one.actor, one.critic) == (other.actor, other.critic) for one, other in ends)
    yield Row(
        "their final weights equal that run's, bit for bit",
        same == len(ends),
        f"on {same} of {len(ends)} trainers",
    )
    yield _judge_refits(calm, faulty)
    counts = calm.suspended + faulty.suspended
    yield Row(
        "both sessions were suspended while the rollouts generated",
        len(counts) == 2 * steps * len(ends) and not any(counts),
        f"{max(counts, default=0)} groups in {len(counts)} suspended trainers",
    )
    yield _judge_lost_rollout(faulty)
    yield _judge_lost_trainer(faulty)
    rest = {
        "actors": left.actors,
        "processes": left.processes,
        "groups": calm.groups + faulty.groups,
        "ports": left.ports,
    }
    yield Row(
        "no actor, process, group or port left",
        not any(rest.values()),
        ", ".join(f"{count} {name}" for name, count in rest.items()),
    )


def _judge_refits(*stories: Story) -> Row:
    pairs = [
        [
            (each.trainers[0].actor, rollout.actor)
            for each in story.refits
            for rollout in each.rollouts
        ]
        for story in stories
    ]
    # Weights that never change would be equal as well.
    versions = [len({ours for ours, _ in run}) for run in pairs]
    same = [sum(ours == theirs for ours, theirs in run) for run in pairs]
    return Row(
        "after each refit the rollouts' weights equal the actor's, bit for bit",
        same == [*map(len, pairs)] and versions == [len(story.refits) for story in stories],
        f"{sum(same)} of {sum(map(len, pairs))} copies, of {versions[-1]} versions of the actor",
    )


def _judge_lost_rollout(story: Story) -> Row:
    claim = "a rollout was killed: the joint group went on without it, then with a new one"
    before: tuple[State, ...] | None = None
    sizes = [len(each.rollouts) for each in story.refits]
    for earlier, later in pairwise(story.refits):
        processes = _processes(earlier.rollouts), _processes(later.rollouts)
        if processes[1] < processes[0]:
            before = earlier.trainers
        elif before is not None and not processes[1] <= processes[0]:
            stayed = _lives(before) == _lives(later.trainers)
            trainers = "the same" if stayed else "restarted"
            return Row(claim, stayed, f"{_runs(sizes)} rollouts; trainers {trainers}")
    return Row(claim, False, f"{_runs(sizes)} rollouts")


def _judge_lost_trainer(story: Story) -> Row:
    claim = "a trainer was killed: Ray restarted it, the other one kept its model"
    for earlier, later in pairwise(story.refits):
        pairs = list(zip(earlier.trainers, later.trainers, strict=True))
        lost = [rank for rank, (one, other) in enumerate(pairs) if one.process != other.process]
        if not lost:
            continue
        others = [pair for rank, pair in enumerate(pairs) if rank not in lost]
        again = bool(others) and all(other.opened == one.opened + 1 for one, other in others)
        named = all(f"rank {rank}" in story.error for rank in lost)
        return Row(
            claim,
            again and named and story.rebound > 0,
            f"its error {'names' if named else 'DOES NOT NAME'} rank {lost[0]}; "
            f"{story.rebound} references rebound",
        )
    return Row(claim, False, "none was restarted")


def _processes(states: Sequence[State]) -> set[int]:
    return {each.process for each in states}


def _lives(states: Sequence[State]) -> list[tuple[int, int]]:
    return [(each.process, each.opened) for each in states]


def _runs(sizes: Sequence[int]) -> str:
    """Return the sizes without repetitions: ``2, 1, 2``."""
    return ", ".join(str(size) for index, size in enumerate(sizes) if sizes[:index][-1:] != [size])
