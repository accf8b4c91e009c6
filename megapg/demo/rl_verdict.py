"""The verdict of ``megapg demo rl``, from the stories of a run without faults and one with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megapg.demo.rl_workers import Opened, Weights
from megapg.demo.verdict import Row


@dataclass
class Story:
    """What happened in one run."""

    losses: list[tuple[float, float]] = field(default_factory=list)  # of actor and critic, by step
    refits: list[tuple[str, tuple[str, ...]]] = field(
        default_factory=list
    )  # by step: digests of the trainer's, the rollouts'
    suspended: list[tuple[int, ...]] = field(
        default_factory=list
    )  # by step: groups of each trainer while the rollouts generate
    weights: list[Weights] = field(default_factory=list)  # at the end, by trainer
    groups_left: int = -1  # in all workers, after they closed; -1 until then
    dropped: Dropped | None = None
    restarted: Restarted | None = None


@dataclass(frozen=True)
class Dropped:
    """A rollout was killed, and the joint group went on without it."""

    step: int
    members: tuple[str, ...]  # trainers and rollouts after each agreement until a new one came
    trainers_stayed: bool  # the same processes and sessions before and after


@dataclass(frozen=True)
class Restarted:
    """A trainer was killed, and Ray restarted it."""

    step: int
    rank: int
    error: str  # of the other trainer's health check
    new_process: bool
    opened: tuple[Opened, ...]  # the sessions, by trainer


@dataclass(frozen=True)
class Left:
    """What is left after the cluster was shut down."""

    actors: int
    processes: int
    ports: tuple[int, ...]


def judge_rl(calm: Story, faulty: Story, left: Left) -> Iterator[Row]:
    """Yield the verdict."""
    pairs = list(zip(calm.losses, faulty.losses, strict=False))
    equal = sum(one == other for one, other in pairs)
    steps = len(calm.losses)
    first, last = faulty.losses[0], faulty.losses[-1]
    yield Row(
        "losses of actor and critic equal a run without faults, bit for bit",
        equal == steps == len(faulty.losses) > 0,
        f"{equal} of {steps} steps; actor {first[0]:.4f} to {last[0]:.4f}, "
        f"critic {first[1]:.4f} to {last[1]:.4f}",
    )
    same = sum(one == other for one, other in zip(calm.weights, faulty.weights, strict=True))
    yield Row(
        "final weights equal that run's, bit for bit",
        same == len(calm.weights) > 0,
        f"on {same} of {len(calm.weights)} trainers",
    )
    refits = [(ours, each) for ours, theirs in calm.refits + faulty.refits for each in theirs]
    good = sum(ours == each for ours, each in refits)
    changed = len({ours for ours, _ in faulty.refits}) == len(faulty.refits)
    yield Row(
        "after each refit the rollouts' weights equal the trainer's, bit for bit",
        good == len(refits) > 0 and changed,
        f"{good} of {len(refits)} copies, {len(faulty.refits)} versions",
    )
    counts = [count for each in calm.suspended + faulty.suspended for count in each]
    yield Row(
        "sessions were suspended while the rollouts generated",
        bool(counts) and max(counts) <= 0,
        f"at most {max(counts, default=0)} groups of theirs in a trainer, {len(counts)} times",
    )
    yield _judge_dropped(faulty.dropped)
    yield _judge_restarted(faulty.restarted)
    rest = {
        "actors": left.actors,
        "processes": left.processes,
        "groups": calm.groups_left + faulty.groups_left,
        "ports": len(left.ports),
    }
    yield Row(
        "no actor, process, group or port left",
        not any(rest.values()),
        ", ".join(f"{count} {name}" for name, count in rest.items()),
    )


def _judge_dropped(dropped: Dropped | None) -> Row:
    claim = "a rollout was killed: the joint group replaced it, the trainers went on"
    if dropped is None:
        return Row(claim, False, "none was killed")
    return Row(
        claim,
        dropped.trainers_stayed and len(set(dropped.members)) > 1,
        f"in step {dropped.step + 1}; members {' then '.join(dropped.members)}",
    )


def _judge_restarted(restarted: Restarted | None) -> Row:
    claim = "a trainer was killed: Ray restarted it, the other one kept its model"
    if restarted is None:
        return Row(claim, False, "none was killed")
    victim = f"rank {restarted.rank}"
    rebound = [each.rebound for each in restarted.opened]
    return Row(
        claim,
        restarted.new_process
        and victim in restarted.error
        and sorted(map(bool, rebound)) == [False, True],
        f"in step {restarted.step + 1}; the error named {victim}; "
        f"{max(rebound)} references rebound",
    )
