"""Saving a checkpoint: :func:`save_checkpoint`.

Every rank writes its own files into a directory that nobody takes for a checkpoint, and syncs
them. Only when all have, the first rank adds what makes the directory one, gives it its name, and
last of all writes the tracker. In between the ranks talk over the store, not through collectives,
so a save may go on in the background, and a rank that dies leaves nobody hanging.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pickle
import socket
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem

from megapg import __version__
from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import rng_records
from megapg.checkpoint.groups import exchanging, layout_of, sizes_of, teamwork
from megapg.checkpoint.manifest import FileSum, write_file, write_manifest
from megapg.checkpoint.names import (
    COMMON_FILE,
    FORMAT_FILE,
    INDEX_FILE,
    CheckpointInfo,
    iteration_name,
)
from megapg.checkpoint.optimizer import OptimizerSharding
from megapg.checkpoint.planning import Item, State, merge_plans, plan_save, sharded_object
from megapg.checkpoint.publish import Partial
from megapg.checkpoint.safe import load_safely
from megapg.checkpoint.saves import CheckpointSave, Saves
from megapg.checkpoint.state import (
    CHECKPOINT_VERSION,
    MegatronOptimizer,
    Stateful,
    check_extra,
    check_groups,
    check_key,
    chunks_of,
    gather_parameters,
    model_state,
    namespace,
)
from megapg.checkpoint.writer import snapshot, write_items
from megapg.collection import ProcessGroupCollection
from megapg.comms.teamwork import CancelledError, OthersFailedError, Teamwork
from megapg.errors import CheckpointError, CheckpointSaveError, RendezvousError
from megapg.layout import ParallelLayout
from megapg.megatron import resolve
from megapg.megatron.core import MegatronCollection
from megapg.rng import RngState, capture_rng_state

logger = logging.getLogger(__name__)

RngRecords: TypeAlias = Literal["both", "per_rank", "per_tp_pp"]
"""How random streams are kept: one record for every rank (Megatron's main branch since #6858), one
for each tensor and pipeline rank (what Megatron-core up to 0.19 reads), or both."""

_LAYOUTS: Mapping[RngRecords, tuple[rng_records.Kind, ...]] = {
    "both": ("per_rank", "per_tp_pp"),
    "per_rank": ("per_rank",),
    "per_tp_pp": ("per_tp_pp",),
}


def save_checkpoint(
    directory: str | os.PathLike[str],
    iteration: int,
    *,
    model: Sequence[torch.nn.Module] | torch.nn.Module,
    optimizer: MegatronOptimizer | None = None,
    scheduler: Stateful | None = None,
    pg_collection: ProcessGroupCollection | MegatronCollection | None = None,
    args: Namespace | Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
    num_floating_point_operations: float = 0,
    optimizer_sharding: OptimizerSharding = "fully_reshardable",
    rng_layout: RngRecords = "both",
    rng_key: str = "rng_state",
    data_parallel_random_init: bool = False,
    fully_parallel: bool = True,
    release: bool = False,
    keep: int | None = None,
    asynchronous: bool = False,
    in_flight: int = 1,
    timeout: float = 300.0,
) -> CheckpointSave:
    """Save a checkpoint that Megatron loads too. Every rank of the groups calls it.

    It becomes visible when it is complete, not before: whatever happens on the way, the one before
    it stays the latest. What an interrupted save left is removed by the next one.

    Args:
        directory: where the checkpoints are, seen by all ranks under one path; made if missing.
        iteration: the number of steps trained; the checkpoint is in ``iter_<7 digits>``. One of the
            same number that is there is replaced.
        model: the model, or its chunks (virtual pipeline), wrapped for data parallelism or not.
        optimizer: what ``get_megatron_optimizer`` returned.
        scheduler: an ``OptimizerParamScheduler``, or what else has a ``state_dict``.
        pg_collection: the groups that model and optimizer were built with. Left out, they come from
            Megatron's globals through :func:`megapg.resolve`.
        args: Megatron's arguments, kept and handed back by :func:`~megapg.load_checkpoint`.
            Megatron checks a good many of them when it loads.
        extra: more state of yours, equal on all ranks (that of the first is kept): numbers,
            strings, containers, tensors. It lies beside Megatron's in the common state.
        num_floating_point_operations: done so far; kept for Megatron.
        optimizer_sharding: how the distributed optimizer's state is cut.
        rng_layout: how random streams are kept; "both" is read by every Megatron.
        rng_key: what they are kept under; several models in one checkpoint need one each.
        data_parallel_random_init: keep the streams of every data-parallel rank, as with Megatron's
            option of that name.
        fully_parallel: spread what data-parallel ranks hold in common over them for writing.
        release: write the directory ``release`` instead, which loads as iteration 0.
        keep: how many complete checkpoints to keep, this one included; all unless given.
        asynchronous: return once the state is copied, and write in the background. Errors surface
            in ``wait()``, at the next save or load with these groups, or when their session closes,
            which waits.
        in_flight: how many background saves may be under way; one more waits for the oldest.
        timeout: seconds of silence after which another rank is given up. The few collectives of
            Megatron's on the way end after the groups' own ``collective_timeout``.

    Returns:
        The save: finished, or with ``asynchronous`` to be waited for.

    Raises:
        CheckpointSaveError: a rank failed or died, the disk is full or read-only, the values can't
            be saved; on every rank that lives, naming who and what.
        CheckpointError: arguments that make no sense.
        MissingGroupError, StaleGroupError, NoCollectionError: see :func:`megapg.resolve`.
    """
    pg = resolve(pg_collection, needs=rng_records.NEEDS, owner="save_checkpoint")
    if asynchronous and pg is not pg_collection:
        raise CheckpointError(
            "asynchronous=True needs pg_collection=: pass session.groups, or a collection of "
            "megapg.from_parallel_state() that you keep, as errors come out where it is used next."
        )
    root = Path(directory).absolute()
    saves = Saves.of(pg.lease)
    saves.make_room(in_flight if asynchronous else 1)
    team = teamwork(pg, "save", timeout, background=asynchronous)
    what = f"saving {'a release' if release else f'iteration {iteration}'} to {root}"
    with _naming(what, team), contextlib.ExitStack() as team_ends:
        settings = {
            "directory": root,
            "iteration": iteration,
            "release": release,
            "optimizer": "none" if optimizer is None else "given",
            "optimizer_sharding": optimizer_sharding,
            "data_parallel_random_init": data_parallel_random_init,
            "fully_parallel": fully_parallel,
        }
        team.begin({name: str(value) for name, value in settings.items()})
        team_ends.enter_context(team)
        saves.raise_news()
        chunks = chunks_of(model)
        check_groups(chunks, pg)
        check_extra(extra or {})
        _check_numbers(iteration, keep, in_flight)
        check_key(rng_key)
        if rng_layout not in _LAYOUTS:
            raise CheckpointError(f"rng_layout={rng_layout!r}: give one of {', '.join(_LAYOUTS)}.")
        # A rank that fails beside a collective leaves the others in it: first all have come there.
        team.agree("arguments")
        with exchanging("parameters", team):
            gather_parameters(chunks, optimizer)
        metadata = optimizers.content_metadata(optimizer, sharding=optimizer_sharding)
        live = optimizers.with_groups(metadata, pg)
        state: State = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": iteration,
            "num_floating_point_operations_so_far": num_floating_point_operations,
            "content_metadata": metadata,
            **(extra or {}),
            **model_state(chunks, live),
        }
        if args is not None:
            state["args"] = namespace(args)
        if scheduler is not None:
            state["opt_param_scheduler"] = scheduler.state_dict()
        optimizers.check(optimizer, metadata)
        team.agree("model")
        gathered: frozenset[int] = frozenset()
        if optimizer is not None:
            with exchanging("the optimizer's state", team):
                of_optimizer = optimizers.sharded_state(
                    optimizer, state, is_loading=False, metadata=live
                )
            gathered = optimizers.gathered_memory(optimizer, of_optimizer, live)
            state["optimizer"] = of_optimizer
        with exchanging("random streams", team):
            records = capture_rng_state(pg, data_parallel_random_init=data_parallel_random_init)
        state |= _random_streams(records, pg, rng_layout, rng_key)
        team.agree("state")
        with exchanging("names of tensors", team):
            items, common = plan_save(state, pg.dp_cp if fully_parallel else None)
        if asynchronous:
            items = snapshot(items, gathered)
        work = _Work(
            what=what,
            team=team,
            root=root,
            iteration=iteration,
            release=release,
            keep=keep,
            items=items,
            common=_serialised(common) if team.leading else b"",
            layout=layout_of(pg),
            after=saves.newest,
        )
        team.agree("in hand")  # all ranks begin to write, or none
        team_ends.pop_all()
    save = CheckpointSave(root, iteration, work.run, team.cancel)
    if asynchronous:
        saves.add(save)
    else:
        save.run()
    return save


@dataclass
class _Work:
    """What is left once the state is in hand: no collectives, so it may go on in the background."""

    what: str
    team: Teamwork
    root: Path
    iteration: int
    release: bool
    keep: int | None
    items: list[Item]
    common: bytes
    layout: ParallelLayout | None
    after: CheckpointSave | None

    def run(self) -> CheckpointInfo:
        """Write, report, and if this rank leads, publish.

        Raises:
            CheckpointSaveError: here or on another rank.
        """
        started = time.monotonic()
        # Undone last: the others must hear what went wrong before they miss the directory.
        with _naming(self.what, self.team), contextlib.ExitStack() as undo, self.team as team:
            partial = None
            if team.leading:
                with team.busy():
                    partial = Partial.begin(
                        self.root, iteration=self.iteration, release=self.release
                    )
                undo.callback(partial.discard)
                team.announce("directory", str(partial.path).encode())
            here = Path(team.announce("directory").decode()) if partial is None else partial.path
            try:
                _check_shared(here)
                written = write_items(here, team.rank, self.items, team.progress, team.busy)
            except (OSError, CheckpointSaveError):
                team.heed()
                raise
            report = [item for item, _ in self.items], written
            self.items = []
            reports = team.collect("written", pickle.dumps(report), final=True)
            if partial is not None:
                sums = self._complete(partial.path, reports)
                while self.after is not None and not self.after.join(0.1):
                    team.progress()  # an older save must not name itself the latest after us
                team.heed()
                with team.busy():
                    info = partial.publish(self.keep)
                undo.pop_all()
                team.announce("published", pickle.dumps(info))
                size = sum(each.size for each in sums.values())
                seconds = time.monotonic() - started
                logger.info("%s: %.1f MiB in %.1f s", self.what, size / 2**20, seconds)
                return info
            published: CheckpointInfo = pickle.loads(team.announce("published"))
            return published

    def _complete(self, here: Path, reports: Mapping[int, bytes]) -> dict[str, FileSum]:
        """Add what is there once: metadata, common state, manifest."""
        plans: dict[int, list[WriteItem]] = {}
        places: dict[int, list[_StorageInfo]] = {}
        sums: dict[str, FileSum] = {}
        for rank, report in reports.items():
            plans[rank], written = pickle.loads(report)
            places[rank] = written.places
            sums |= written.sums
            for name, known in written.sums.items():
                _check_arrived(here / name, known.size, rank)
        metadata = merge_plans(plans, places, iteration_name(self.iteration))
        for name, data in (
            (INDEX_FILE, pickle.dumps(metadata)),
            (COMMON_FILE, self.common),
            (FORMAT_FILE, json.dumps(_FORMAT).encode()),
        ):
            sums[name] = write_file(here / name, data)
        about = {
            "version": __version__,
            "iteration": self.iteration,
            "layout": None if self.layout is None else sizes_of(self.layout),
        }
        write_manifest(here, sums, about)
        return sums


# What metadata.json says; Megatron-core 0.19 asks for the first two, earlier ones for all.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _random_streams(
    records: list[RngState], pg: ProcessGroupCollection, layout: RngRecords, key: str
) -> State:
    entries = rng_records.entries(records, pg, _LAYOUTS[layout], key=key)
    return {
        f"rng_state {number}": sharded_object(
            entry.key,
            entry.data,
            shape=entry.global_shape,
            offset=entry.global_offset,
            replica=entry.replica_id,
        )
        for number, entry in enumerate(entries)
    }


def _serialised(common: State) -> bytes:
    """The bytes of ``common.pt``, once it is certain that they can be loaded again."""
    buffer = io.BytesIO()
    try:
        torch.save(common, buffer)
        load_safely(io.BytesIO(buffer.getvalue()), COMMON_FILE)
    except Exception as error:
        raise CheckpointSaveError(
            f"args, extra or the scheduler's state can't be saved so that it loads safely: {error} "
            "Give plain values: numbers, strings, containers, tensors."
        ) from error
    return buffer.getvalue()


def _check_numbers(iteration: int, keep: int | None, in_flight: int) -> None:
    if in_flight < 1:
        raise CheckpointError(f"in_flight={in_flight}: how many may be under way, 1 or more.")
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise CheckpointError(f"iteration={iteration!r}: give the number of steps, 0 or more.")
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep={keep}: the newest is always kept, so give 1 or more.")


def _check_shared(here: Path) -> None:
    if not here.is_dir():
        raise CheckpointSaveError(
            f"{here} was made by the first rank, and {socket.gethostname()} does not see it. Save "
            "to a file system that all hosts share, under one path."
        )


def _check_arrived(file: Path, size: int, rank: int) -> None:
    found = file.stat().st_size if file.exists() else None
    if found != size:
        raise CheckpointSaveError(
            f"rank {rank} wrote {file.name} with {size} bytes, and the first rank sees "
            f"{'none of it' if found is None else f'{found} bytes'} at {file.parent}. Save to a "
            "file system that all hosts share, under one path."
        )


@contextlib.contextmanager
def _naming(what: str, team: Teamwork) -> Iterator[None]:
    """Errors that say what was going on; the last checkpoint is safe in every case."""
    try:
        yield
    except OthersFailedError as error:
        said = str(error).rstrip(".")
        raise CheckpointSaveError(f"{what} failed: {said}.", error.problems) from error
    except RendezvousError as error:
        problems = dict.fromkeys(error.missing, "did not come")
        said = f"{what} failed: {error} Every rank has to call it, with the same arguments."
        raise CheckpointSaveError(said, problems) from error
    except CancelledError as error:
        said = f"{what} was called off on rank {team.rank}."
        raise CheckpointSaveError(said, {team.rank: "called it off"}) from error
    except CheckpointSaveError as error:
        problems = error.problems or {team.rank: str(error)}
        raise CheckpointSaveError(f"{what} failed: {error}", problems) from error
    except OSError as error:
        reason = f"rank {team.rank} on {socket.gethostname()}: {error}"
        raise CheckpointSaveError(f"{what} failed: {reason}.", {team.rank: str(error)}) from error
