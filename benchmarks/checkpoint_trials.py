"""Saving and loading a checkpoint: megapg, ``dist_checkpointing`` called directly, and torch's DCP.

All contestants have the same model and optimizer in the same processes. They write to the same file
system and take turns, in another order in each repeat. Ratios are taken within a repeat. Each
contestant runs once before the repeats, since first calls import modules and start helper
processes. The clock of a save starts before the state is described, and stops when the checkpoint
is complete on the slowest rank. The clock of a load stops when model and optimizer have the state.
Loads read from the page cache, so only ``fsync`` depends on the disk.

The direct contestants do the same as a training script. They describe model, optimizer and random
streams as sharded tensors and objects, and pass them on. The optimizer gets the loaded state with
megapg's repairs for torch's Adam, without which Megatron-core can't take it on a CPU. DCP gets each
rank's tensors under separate names, and so can load in this layout only. It shows the least cost of
writing and reading.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

import megapg
from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import rng_entries
from megapg.checkpoint.can_reshard import OptimizerSharding
from megapg.checkpoint.directory import iteration_name
from megapg.checkpoint.restore import restore
from megapg.checkpoint.state import gather_parameters, load_model, model_state, prepare_parameters
from megapg.rng import capture_rng_state
from megapg.testing import megatron_on_cpu
from megapg.testing.distributed import run_distributed
from megapg.tools.demo import gpt
from megapg.tools.demo.job import GPTRun

REPEATS = 7
WORLDS = (2, 4)
DIRECT_TARGET = 1.05
"""Most that a save or load may cost of dist_checkpointing called directly."""
CHECKED_TARGET = 1.10
"""Most that a load may cost, which checks what it reads, of one that does not."""
VERIFIED_TARGET = 1.3
"""Most that a load may cost, which checks every file first, of one that does not."""
BARE_SAVE_TARGET = 1.0
"""Most that a save may cost of torch DCP's of as many bytes, which has no checksums."""
BARE_LOAD_TARGET = 1.2
"""Most that a load may cost of torch DCP's of as many bytes."""
BLOCKING_TARGET = 0.25
"""Most of a synchronous save's time for which an asynchronous one may hold up the training."""

# 12.7 million parameters: 194 MiB with Adam's moments and the optimizer's own weights.
_RUN = GPTRun(tp=2, layers=4, hidden=512, heads=4, seq_length=32)
_QUICK_RUN = GPTRun(tp=2, layers=2, hidden=64, heads=4, seq_length=32)
_FIRST_CALL = -1
_TRIAL_S = 15.0  # for the deadline; a trial takes a second


# -- the contestants -------------------------------------------------------------------------------


@dataclass
class _Job:
    """One rank's model and optimizer, and the state that contestants keep between calls."""

    run: GPTRun
    pg: megapg.ProcessGroupCollection
    chunks: list[Any]
    optimizer: Any
    calls: AsyncCallsQueue

    @classmethod
    def build(cls, run: GPTRun, pg: megapg.ProcessGroupCollection) -> _Job:
        gpt._seed(run.seed, pg)
        chunks = gpt.build_chunks(run, pg, pg.pp)
        optimizer = gpt.build_optimizer(run, chunks, pg)
        optimizers.prepare(optimizer)
        job = cls(run, pg, chunks, optimizer, AsyncCallsQueue())
        for moment in job.moments():  # untouched zeros all share one page
            moment.normal_()
        return job

    def adam(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self.optimizer.chained_optimizers[0].optimizer
        return inner

    def moments(self) -> Iterator[torch.Tensor]:
        for state in self.adam().state.values():
            yield from (state["exp_avg"], state["exp_avg_sq"])


def _megapg(
    job: _Job,
    directory: Path,
    *,
    asynchronous: bool = False,
    sharding: OptimizerSharding = "fully_reshardable",
) -> Callable[[], object]:
    return megapg.save_checkpoint(
        directory,
        1,
        model=job.chunks,
        optimizer=job.optimizer,
        pg_collection=job.pg,
        optimizer_sharding=sharding,
        asynchronous=asynchronous,
    ).wait


def _load_megapg(job: _Job, directory: Path, *, verify: bool | None = None) -> None:
    megapg.load_checkpoint(
        directory,
        model=job.chunks,
        optimizer=job.optimizer,
        pg_collection=job.pg,
        verify=verify,
    )


def _direct(job: _Job, directory: Path, *, asynchronous: bool = False) -> Callable[[], object]:
    path = directory / iteration_name(1)
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    prepare_parameters(job.optimizer)
    gather_parameters(job.chunks)
    metadata = optimizers.content_metadata(job.optimizer)
    state = _sharded(job, metadata, is_loading=False)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), job.pg.dp_cp)
    request = dist_checkpointing.save(
        {**state, "checkpoint_version": 3.0, "iteration": 1},
        str(path),
        strategy,
        async_sharded_save=asynchronous,
        content_metadata=metadata,
        **_BY_ITSELF,
    )
    if request is None:
        return lambda: None
    job.calls.schedule_async_request(request)
    return partial(job.calls.maybe_finalize_async_calls, blocking=True)


# Newer versions use another package for asynchronous saves by default.
_BY_ITSELF: dict[str, Any] = (
    {"async_strategy": "mcore"}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
    else {}
)


def _load_direct(job: _Job, directory: Path) -> None:
    path = str(directory / iteration_name(1))
    metadata = dist_checkpointing.load_content_metadata(path)
    found = dist_checkpointing.load(_sharded(job, metadata, is_loading=True), path)
    load_model(job.chunks, found, strict=True)
    restore(job.optimizer, found["optimizer"])


def _sharded(job: _Job, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    live = optimizers.with_groups(metadata, job.pg)
    state = model_state(job.chunks, live)
    state["optimizer"] = job.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=live
    )
    [state["rng_state"]] = rng_entries.entries(capture_rng_state(job.pg), job.pg, ("per_tp_pp",))
    return state


def _bare(job: _Job, directory: Path) -> Callable[[], object]:
    prepare_parameters(job.optimizer)
    gather_parameters(job.chunks)
    state_dict_saver.save(_tensors(job), checkpoint_id=directory / iteration_name(1))
    return lambda: None


def _load_bare(job: _Job, directory: Path) -> None:
    state_dict_loader.load(_tensors(job), checkpoint_id=directory / iteration_name(1))


def _tensors(job: _Job) -> dict[str, torch.Tensor]:
    """Return the weights, shared by data-parallel ranks, and each rank's optimizer state."""
    tp, rank = job.pg.rank("tp"), dist.get_rank()
    tensors = {
        f"tp{tp}.{name}": weight.detach() for name, weight in job.chunks[0].named_parameters()
    }
    for number, (main, state) in enumerate(job.adam().state.items()):
        for name, tensor in {"param": main.detach(), **state}.items():
            tensors[f"rank{rank}.{number}.{name}"] = tensor
    return tensors


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    """Switch off XXH3. torch.save keeps its CRC-32, as in torch DCP's files."""
    none = {"xxh3_64": _NoChecksum, "xxh3_128": _NoChecksum}
    with mock.patch.multiple("megapg.checkpoint.writer", **none):
        yield


@contextlib.contextmanager
def _without_fsync() -> Iterator[None]:
    with mock.patch("os.fsync", new=_no_fsync):  # also in the processes that are forked here
        yield


class _NoChecksum:
    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


def _no_fsync(descriptor: int) -> None:
    pass


@dataclass(frozen=True)
class Contestant:
    """One way to save, or to load.

    Attributes:
        name: for the tables.
        call: saves or loads. A save returns a function that waits until the checkpoint is complete.
        loads: the save whose checkpoint is loaded; None for a save.
        under: context of the call.
    """

    name: str
    call: Callable[..., Callable[[], object] | None]
    loads: str | None = None
    under: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


MEGAPG = Contestant("megapg.save_checkpoint", _megapg)
ASYNC = Contestant("save_checkpoint, asynchronous", partial(_megapg, asynchronous=True))
DP = Contestant("save_checkpoint, dp_reshardable", partial(_megapg, sharding="dp_reshardable"))
DP_ASYNC = Contestant(
    "save_checkpoint, dp_reshardable, asynchronous",
    partial(_megapg, sharding="dp_reshardable", asynchronous=True),
)
NO_SUMS = Contestant("save_checkpoint without checksums", _megapg, under=_without_checksums)
NO_FSYNC = Contestant("save_checkpoint without fsync", _megapg, under=_without_fsync)
DIRECT = Contestant("dist_checkpointing.save", _direct)
DIRECT_ASYNC = Contestant(
    "dist_checkpointing.save, asynchronous", partial(_direct, asynchronous=True)
)
DIRECT_NO_FSYNC = Contestant("dist_checkpointing.save without fsync", _direct, under=_without_fsync)
BARE = Contestant("torch DCP, save", _bare)
LOAD = Contestant("megapg.load_checkpoint", _load_megapg, loads=MEGAPG.name)
VERIFIED = Contestant(
    "load_checkpoint with verify=True", partial(_load_megapg, verify=True), loads=MEGAPG.name
)
UNCHECKED = Contestant(
    "load_checkpoint with verify=False", partial(_load_megapg, verify=False), loads=MEGAPG.name
)
LOAD_DIRECT = Contestant("dist_checkpointing.load", _load_direct, loads=DIRECT.name)
LOAD_BARE = Contestant("torch DCP, load", _load_bare, loads=BARE.name)

SAVES = (
    MEGAPG,
    ASYNC,
    DP,
    DP_ASYNC,
    NO_SUMS,
    NO_FSYNC,
    DIRECT,
    DIRECT_ASYNC,
    DIRECT_NO_FSYNC,
    BARE,
)
LOADS = (LOAD, UNCHECKED, LOAD_DIRECT, VERIFIED, LOAD_BARE)
CONTESTANTS = (*SAVES, *LOADS)


@dataclass(frozen=True)
class Comparison:
    """Two contestants to compare.

    Attributes:
        what: for the table.
        ours: the first contestant.
        theirs: the second.
        target: largest promised ratio; None if there is none.
        quantity: of a trial of ours.
        by: of a trial of theirs.
    """

    what: str
    ours: Contestant
    theirs: Contestant
    target: float | None = None
    quantity: str = "wall"
    by: str = "wall"


COMPARISONS = (
    Comparison("save", MEGAPG, DIRECT, DIRECT_TARGET),
    Comparison("load", LOAD, LOAD_DIRECT, DIRECT_TARGET),
    Comparison(
        "what an asynchronous save blocks, of a synchronous save",
        ASYNC,
        MEGAPG,
        BLOCKING_TARGET,
        quantity="blocked",
    ),
    Comparison("the same, dp_reshardable", DP_ASYNC, DP, BLOCKING_TARGET, quantity="blocked"),
    Comparison("the same of dist_checkpointing's", DIRECT_ASYNC, DIRECT, quantity="blocked"),
    Comparison(
        "what an asynchronous save blocks, of what dist_checkpointing's does",
        ASYNC,
        DIRECT_ASYNC,
        quantity="blocked",
        by="blocked",
    ),
    Comparison("save, both without fsync", NO_FSYNC, DIRECT_NO_FSYNC),
    Comparison("save without checksums, of one with", NO_SUMS, MEGAPG),
    Comparison("save without fsync, of one with", NO_FSYNC, MEGAPG),
    Comparison("load, of one with verify=False", LOAD, UNCHECKED, CHECKED_TARGET),
    Comparison("load with verify=True, of one without", VERIFIED, LOAD, VERIFIED_TARGET),
    Comparison("save, of torch DCP", MEGAPG, BARE, BARE_SAVE_TARGET),
    Comparison("save without checksums, of torch DCP, which has none", NO_SUMS, BARE),
    Comparison("load, of torch DCP", LOAD, LOAD_BARE, BARE_LOAD_TARGET),
)


# -- the trials ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankTrial:
    """One rank's part of a trial.

    Attributes:
        blocked: seconds until the call returned.
        wall: seconds until the checkpoint was complete, or loaded.
        cpu: CPU seconds until then, of this rank, its threads, and processes it started.
        size: bytes of the whole checkpoint.
    """

    blocked: float
    wall: float
    cpu: float
    size: int


@dataclass(frozen=True)
class Trial:
    """One contestant in one repeat, on all ranks."""

    contestant: Contestant
    repeat: int
    ranks: tuple[RankTrial, ...]

    @property
    def blocked(self) -> float:
        """Return the seconds for which the slowest rank could not train."""
        return max(rank.blocked for rank in self.ranks)

    @property
    def wall(self) -> float:
        """Return the seconds until the slowest rank was done."""
        return max(rank.wall for rank in self.ranks)

    @property
    def cpu(self) -> float:
        """Return the CPU seconds of all ranks together."""
        return sum(rank.cpu for rank in self.ranks)

    @property
    def size(self) -> int:
        """Return the size of the checkpoint in bytes."""
        return max(rank.size for rank in self.ranks)


@dataclass(frozen=True)
class Spread:
    """A ratio within each repeat: the median over the repeats, the minimum and the maximum."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Standings:
    """All contestants in one world.

    Attributes:
        world_size: number of ranks; tp=2, the rest is data parallelism.
        file_system: type of the file system, as the kernel calls it.
        trials: first calls included.
    """

    world_size: int
    file_system: str
    trials: tuple[Trial, ...]

    def of(self, contestant: Contestant) -> list[Trial]:
        """Return the repeats of one contestant, in order."""
        return [t for t in self.trials if t.contestant is contestant and t.repeat != _FIRST_CALL]

    def median(self, contestant: Contestant, quantity: str) -> float:
        """Return the median over the repeats."""
        median: float = statistics.median(getattr(t, quantity) for t in self.of(contestant))
        return median

    def first_call(self, contestant: Contestant) -> float:
        """Return the seconds of the first call in a process."""
        return next(
            trial.wall
            for trial in self.trials
            if trial.contestant is contestant and trial.repeat == _FIRST_CALL
        )

    def ratio(self, compared: Comparison, quantity: str = "") -> Spread:
        """Return the ratio of a comparison, of its quantity or another one."""
        ratios = [
            getattr(ours, quantity or compared.quantity) / getattr(theirs, quantity or compared.by)
            for ours, theirs in zip(self.of(compared.ours), self.of(compared.theirs), strict=True)
        ]
        return Spread(statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Plan:
    """One trial to run; every rank computes the same list."""

    contestant: int  # an index: the functions stay out of the pickles
    repeat: int


def plans(repeats: int) -> list[Plan]:
    """Return the trials of one world in order: all saves of a repeat, then its loads."""
    saves, loads = range(len(SAVES)), range(len(SAVES), len(CONTESTANTS))
    first = [Plan(index, _FIRST_CALL) for index in (*saves, *loads)]
    # Shuffled, as a contestant may leave the disk busy for the next one.
    turns = [random.Random(repeat) for repeat in range(repeats)]
    return first + [
        Plan(index, repeat)
        for repeat, turn in enumerate(turns)
        for indices in (saves, loads)
        for index in turn.sample(indices, len(indices))
    ]


def run(world_size: int, repeats: int, *, quick: bool = False) -> Standings:
    """Run every trial in one world.

    Args:
        world_size: number of processes, all on this host; even.
        repeats: how often each contestant runs, besides its first call.
        quick: use a tiny model, whose times mean nothing.
    """
    todo = plans(repeats)
    with tempfile.TemporaryDirectory() as root:
        by_rank = run_distributed(
            partial(_every_trial, quick, todo, Path(root)),
            world_size,
            deadline=60 + len(todo) * _TRIAL_S,
            preload=["benchmarks.checkpoint_trials"],
            # Megatron-core's helper processes leave directories behind when they are killed.
            env={"PYTHONWARNINGS": "ignore", "TMPDIR": root},
        )
        file_system = _file_system(Path(root))
    trials = [
        Trial(CONTESTANTS[plan.contestant], plan.repeat, tuple(parts))
        for plan, *parts in zip(todo, *by_rank, strict=True)
    ]
    return Standings(world_size, file_system, tuple(trials))


def _file_system(path: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    over = [mount for mount in mounts if path.resolve().is_relative_to(mount[1])]
    return max(over, key=lambda mount: len(mount[1]))[2]


# -- in the ranks ----------------------------------------------------------------------------------


def _every_trial(quick: bool, todo: Sequence[Plan], root: Path) -> list[RankTrial]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with (
        megatron_on_cpu(),
        megapg.session(tp=2) as session,
        megapg.published(session.groups),
    ):
        job = _Job.build(_QUICK_RUN if quick else _RUN, session.groups)
        done = [_trial(job, plan, root) for plan in todo]
        gpt.let_go(job.chunks)
    return done


def _trial(job: _Job, plan: Plan, root: Path) -> RankTrial:
    contestant = CONTESTANTS[plan.contestant]
    # The first checkpoint of each way to save is kept for the loads.
    keep = plan.repeat == _FIRST_CALL
    directory = root / (contestant.loads or (contestant.name if keep else "scratch"))
    check = _erase(job) if contestant.loads else None
    with contestant.under():
        dist.barrier()
        started, cpu = time.perf_counter(), _cpu_seconds()
        finish = contestant.call(job, directory)
        blocked = time.perf_counter() - started
        if finish is not None:
            finish()
        trial = RankTrial(
            blocked=blocked,
            wall=time.perf_counter() - started,
            cpu=_cpu_seconds() - cpu,
            size=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        )
    if check is not None:
        check()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root / "scratch", ignore_errors=True)  # unsynced data is then never written
    dist.barrier()
    return trial


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _erase(job: _Job) -> Callable[[], None]:
    """Spoil a weight and a moment; the returned function raises unless both are restored."""
    places = [next(job.chunks[0].parameters()).detach(), next(job.moments())]
    before = [place.clone() for place in places]
    for place in places:
        place.zero_()

    def check() -> None:
        now = [next(job.chunks[0].parameters()).detach(), next(job.moments())]
        if not all(map(torch.equal, before, now)):
            raise AssertionError("a load did not bring back what was saved")

    return check
