"""Creating every group and using each once: seconds, calls, and the resources of a rank.

A *trial* is one contestant in one fresh set of processes. Every rank forks a child from the same
warm image (all imports done, no WORLD yet). The child makes the image's pages its own, makes WORLD,
warms it up, runs the contestant and exits. Therefore, no trial inherits sockets, threads or globals
from another, and none pays for imports or for the fork. Within a repeat the contestants follow each
other directly. Each repeat starts with another one, so that a noisy moment does not always hit the
same contestant. The first trial of a world size is discarded, as the ranks are still arriving from
their launch.

Wall time on a few cores depends on other processes. The CPU time of all ranks together depends on
them much less, so both are reported.
"""

from __future__ import annotations

import gc
import os
import pickle
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
import torch.distributed as dist

from benchmarks.peers import (
    BASELINE,
    CONTESTANTS,
    FIELDS,
    FLOOR,
    SESSION,
    Contestant,
    Groups,
    Shape,
)
from benchmarks.probe import CallCounter, Holdings, own_every_page
from benchmarks.table import Options, Table, verdict
from megapg.testing.distributed import run_distributed

SHAPES = (Shape(tp=2, pp=2, ep=1), Shape(tp=2, pp=2, ep=2))
CREATE, USE = "create", "create + use"
STAGES = (CREATE, USE, "... + all pairs")
"""Moments on a trial's clock. *use* is a one-element all_reduce on every field; *all pairs* is an
all_to_all after it, which makes even a lazily connected group connect everybody with everybody."""

TARGETS = {16: 0.25, 32: 0.25, 64: 0.25}
"""World size -> most that the session may cost of initialize_model_parallel, creation alone."""

_WARM_UP = -1
_OWN_PAGES = 32
"""More ranks than so many would not fit: there each contestant pays for having been forked."""
_TRIAL_S = 90.0  # torch's timeouts in a trial; a trial takes seconds


@dataclass(frozen=True)
class RankTrial:
    """One rank's part of a trial.

    Attributes:
        wall: seconds from the common start to each stage.
        cpu: CPU seconds, of all threads, user and system, to each stage.
        calls: calls that make groups.
        communicators: added to torch's registry by this contestant; likewise the rest.
        threads: of the process.
        descriptors: open files and sockets.
        memory: proportional set size in KiB.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]
    calls: int
    communicators: int
    threads: int
    descriptors: int
    memory: int


@dataclass(frozen=True)
class Trial:
    """One contestant, one layout, one repeat, on all ranks."""

    world_size: int
    shape: Shape
    contestant: Contestant
    repeat: int
    ranks: tuple[RankTrial, ...]

    def seconds(self, stage: str) -> float:
        """Return the seconds from the common start until the slowest rank finished the stage."""
        index = STAGES.index(stage)
        slowest: float = max(rank.wall[index] for rank in self.ranks)
        return slowest

    def cpu_seconds(self, stage: str) -> float:
        """Return the CPU time of all ranks until the stage."""
        index = STAGES.index(stage)
        return sum(rank.cpu[index] for rank in self.ranks)

    def per_rank(self, quantity: str) -> float:
        """Return the median over the ranks of a resource of each rank."""
        # Ranks differ slightly (pos_embd is only on the first stage). median_high avoids halves.
        median: float = statistics.median_high(getattr(rank, quantity) for rank in self.ranks)
        return median


@dataclass(frozen=True)
class Plan:
    """One trial to run; every rank computes the same list."""

    shape: Shape
    contestant: int  # an index: the functions stay out of the pickles
    repeat: int


def plans(world_size: int, repeats: int) -> list[Plan]:
    """Return the trials of one world size, in order."""
    count = len(CONTESTANTS)
    return [Plan(SHAPES[0], 0, _WARM_UP)] + [
        Plan(shape, (turn + repeat) % count, repeat)
        for repeat in range(repeats)
        for shape in SHAPES
        if shape.fits(world_size)
        for turn in range(count)
    ]


def tables(given: Options) -> list[Table]:
    """Return the tables for all world sizes."""
    trials = [trial for size in given.worlds for trial in run(size, given.repeat)]
    found = contests(trials)
    return [_verdicts(found), _creation(found), _holdings(found)]


def run(world_size: int, repeats: int) -> list[Trial]:
    """Run every trial of one world size.

    Args:
        world_size: number of processes, all on this host.
        repeats: how often each contestant runs.
    """
    todo = plans(world_size, repeats)
    by_rank = run_distributed(
        partial(_every_trial, todo),
        world_size,
        deadline=60 + len(todo) * (5 + world_size / 2),
        preload=["benchmarks.creation"],
        env={"PYTHONWARNINGS": "ignore"},  # about missing packages
    )
    return [
        Trial(world_size, plan.shape, CONTESTANTS[plan.contestant], plan.repeat, tuple(parts))
        for plan, *parts in zip(todo, *by_rank, strict=True)
        if plan.repeat != _WARM_UP
    ]


# -- in the ranks ----------------------------------------------------------------------------------


def _every_trial(todo: Sequence[Plan]) -> list[RankTrial]:
    gc.collect()
    gc.freeze()  # else the children's collector would write to, and so copy, every inherited page
    return [_in_child(partial(_trial, plan, index)) for index, plan in enumerate(todo)]


def _in_child(work: Callable[[], RankTrial]) -> RankTrial:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _report(work, writer)
    os.close(writer)
    with open(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    if not answer:
        raise ChildProcessError("the process of a trial died without an answer")
    result = pickle.loads(answer)
    if isinstance(result, str):
        raise RuntimeError(f"a trial failed:\n{result}")
    trial: RankTrial = result
    return trial


def _report(work: Callable[[], RankTrial], writer: int) -> NoReturn:
    try:
        result: RankTrial | str = work()
    except BaseException:
        result = traceback.format_exc()
    with open(writer, "wb") as stream:
        pickle.dump(result, stream)
    os._exit(0)


def _trial(plan: Plan, index: int) -> RankTrial:
    contestant = CONTESTANTS[plan.contestant]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size <= _OWN_PAGES:
        own_every_page()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    waiting = timedelta(seconds=_TRIAL_S)
    shared = dist.TCPStore(address, port, is_master=False, timeout=waiting)
    store = dist.PrefixStore(f"trial/{index}", shared)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=waiting)
    _reduce(None)  # warms up WORLD and loads torch's code for collectives
    dist.barrier()

    before, counter = Holdings.now(), CallCounter()
    started, cpu_before = _start_together(store, rank, world_size), time.process_time()
    moments = []
    groups = contestant.create(plan.shape)
    moments.append((time.monotonic(), time.process_time()))
    for group in _used(contestant, groups):
        _reduce(group)
    moments.append((time.monotonic(), time.process_time()))
    for group in _used(contestant, groups):
        _exchange(group)
    moments.append((time.monotonic(), time.process_time()))
    dist.barrier()  # outside the clock: count resources after all ranks have connected

    after = Holdings.now()
    _leave_together(store, rank, world_size)
    return RankTrial(
        wall=tuple(wall - started for wall, _ in moments),
        cpu=tuple(cpu - cpu_before for _, cpu in moments),
        calls=counter.calls,
        communicators=after.communicators - before.communicators,
        threads=after.threads - before.threads,
        descriptors=after.descriptors - before.descriptors,
        memory=after.memory - before.memory,
    )


def _start_together(store: dist.Store, rank: int, world_size: int) -> float:
    """Wait for a common time that rank 0 chooses, as ranks leave a barrier one after the other.

    All ranks are on one host, and so share the monotonic clock.
    """
    dist.barrier()
    if rank == 0:
        store.set("start", repr(time.monotonic() + 0.1 + 0.005 * world_size))
    start = float(store.get("start"))
    time.sleep(max(0.0, start - time.monotonic()))
    return start


def _leave_together(store: dist.Store, rank: int, world_size: int) -> None:
    """Meet over the store, which outlives the ranks. An early exit would break a collective."""
    store.set(f"left/{rank}", "")
    store.wait([f"left/{other}" for other in range(world_size)])


def _used(contestant: Contestant, groups: Groups) -> Iterator[dist.ProcessGroup]:
    for field in contestant.fields:
        group = groups.get(field)
        if group is not None:
            yield group
        elif field not in ("embd", "pos_embd"):
            raise LookupError(f"{contestant.name} has no group for {field}")


def _reduce(group: dist.ProcessGroup | None) -> None:
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    if int(value) != dist.get_world_size(group):
        raise ArithmeticError(f"{int(value)} ranks answered of {dist.get_world_size(group)}")


def _exchange(group: dist.ProcessGroup) -> None:
    values = torch.ones(dist.get_world_size(group))
    dist.all_to_all_single(torch.empty_like(values), values, group=group)


# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Standing:
    """One contestant at one world size and shape, over the repeats."""

    trials: tuple[Trial, ...]

    @property
    def contestant(self) -> Contestant:
        return self.trials[0].contestant

    def seconds(self, stage: str) -> float:
        """Return the median over the repeats."""
        return statistics.median(trial.seconds(stage) for trial in self.trials)

    def cpu_seconds(self, stage: str) -> float:
        """Return the median over the repeats."""
        return statistics.median(trial.cpu_seconds(stage) for trial in self.trials)

    def per_rank(self, quantity: str) -> float:
        """Return the median over ranks and repeats."""
        return statistics.median(trial.per_rank(quantity) for trial in self.trials)


@dataclass(frozen=True)
class Contest:
    """All contestants at one world size and shape."""

    world_size: int
    shape: Shape
    standings: tuple[Standing, ...]

    def of(self, contestant: Contestant) -> Standing:
        """Return the standing of one contestant."""
        return next(s for s in self.standings if s.contestant is contestant)

    def ratio(self, stage: str, peer: Contestant = BASELINE) -> float:
        """Return the session's median wall time divided by the peer's."""
        return self.of(SESSION).seconds(stage) / self.of(peer).seconds(stage)

    def cpu_ratio(self, stage: str, peer: Contestant = BASELINE) -> float:
        """Return the same ratio for CPU time."""
        return self.of(SESSION).cpu_seconds(stage) / self.of(peer).cpu_seconds(stage)

    def spread(self, stage: str, peer: Contestant = BASELINE) -> tuple[float, float]:
        """Return the lowest and the highest ratio of wall times within one repeat."""
        pairs = zip(self.of(SESSION).trials, self.of(peer).trials, strict=True)
        ratios = [ours.seconds(stage) / theirs.seconds(stage) for ours, theirs in pairs]
        return min(ratios), max(ratios)

    @property
    def floor(self) -> float:
        """Return ``ratio(USE)`` for a free creation and the peer's cost of use."""
        peer = self.of(BASELINE)
        return 1 - peer.seconds(CREATE) / peer.seconds(USE)

    @property
    def bare(self) -> tuple[float, float]:
        """Return the cost of the bare communicators, divided by the cost of the peer's creation.

        The first ratio is of wall time, the second of CPU time.
        """
        floor, peer = self.of(FLOOR), self.of(BASELINE)
        return (
            floor.seconds(CREATE) / peer.seconds(CREATE),
            floor.cpu_seconds(CREATE) / peer.cpu_seconds(CREATE),
        )


def contests(trials: Sequence[Trial]) -> list[Contest]:
    """Group trials by world size and shape, in the order of first appearance."""
    by_contest: dict[tuple[int, Shape], list[Trial]] = {}
    for trial in trials:
        by_contest.setdefault((trial.world_size, trial.shape), []).append(trial)
    return [Contest(*key, _standings(found)) for key, found in by_contest.items()]


def _standings(trials: Sequence[Trial]) -> tuple[Standing, ...]:
    by_name: dict[str, list[Trial]] = {}
    for trial in trials:
        by_name.setdefault(trial.contestant.name, []).append(trial)
    return tuple(Standing(tuple(by_name[contestant.name])) for contestant in CONTESTANTS)


def _verdicts(contests: Sequence[Contest]) -> Table:
    rows = []
    for contest in contests:
        low, high = contest.spread(CREATE)
        ratio = contest.ratio(CREATE)
        rows.append(
            (
                f"world {contest.world_size}, {contest.shape}",
                f"{ratio:.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{contest.cpu_ratio(CREATE):.2f}",
                *verdict(ratio, TARGETS.get(contest.world_size)),
                " / ".join(f"{each:.2f}" for each in contest.bare),
                f"{contest.ratio(USE):.2f}",
                f"{contest.floor:.2f}",
            )
        )
    return Table(
        f"Create every group: {SESSION.name} against {BASELINE.name}",
        (
            *("", "ratio", "within one repeat", "ratio of CPU time", "wanted", ""),
            *("floor, of both", "create and use", "its floor"),
        ),
        tuple(rows),
        (
            "The floor is the time that torch alone takes to make the session's communicators, as "
            'a ratio of wall and of CPU time. "Create and use" adds one all_reduce on each of the '
            f"{len(FIELDS)} fields; its floor is the share of that use in the peer's time.",
        ),
    )


def _creation(contests: Sequence[Contest]) -> Table:
    rows = []
    for contest in contests:
        for standing in contest.standings:
            peer = standing.contestant
            if peer is SESSION:
                continue
            seconds = contest.of(SESSION).seconds(USE), standing.seconds(USE)
            rows.append(
                (
                    f"{contest.world_size}, {contest.shape}",
                    peer.name,
                    *(f"{contest.ratio(stage, peer):.2f}" for stage in STAGES),
                    f"{contest.cpu_ratio(USE, peer):.2f}",
                    " / ".join(f"{each:.3f}" for each in seconds),
                )
            )
    return Table(
        f"{SESSION.name} against each peer",
        ("world, layout", "peer", *STAGES, f"CPU, {USE}", f"s, {USE} (noise)"),
        tuple(rows),
        (
            '"All pairs" adds an all_to_all on every field, since a session connects pairs at '
            "first use and the peers connect them at creation. Gloo twins are the second data "
            "parallel groups of `initialize_model_parallel`; `init_device_mesh` makes 4 fields and "
            f"the others {len(FIELDS)}.",
        ),
    )


def _holdings(contests: Sequence[Contest]) -> Table:
    counted = ("calls", "communicators", "threads", "descriptors")
    rows = tuple(
        (
            f"{contest.world_size}, {contest.shape}",
            standing.contestant.name,
            *(f"{standing.per_rank(quantity):.0f}" for quantity in counted),
            f"{standing.per_rank('memory') / 1024:.1f}",
        )
        for contest in contests
        for standing in contest.standings
    )
    return Table(
        "Resources of one rank",
        ("world, layout", "contestant", *counted, "memory in MiB"),
        rows,
        (
            "Medians over the ranks, after all pairs have exchanged data. Calls are the outermost "
            "calls of `new_group` and `split_group`; memory is the proportional set size.",
        ),
    )
