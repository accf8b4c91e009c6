"""Saving a checkpoint: :func:`save_checkpoint`.

Every rank writes and syncs its own files in a hidden directory. When all have, the first rank adds
the files that complete the checkpoint, gives the directory its final name, and finally writes the
tracker. In between, the ranks communicate over the store, not through collectives. So a save may
run in the background, and a rank that dies leaves no other rank hanging.
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.planner import WriteItem

from megapg import __version__
from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import rng_entries
from megapg.checkpoint.background import CheckpointSave, Saves
from megapg.checkpoint.can_reshard import OptimizerSharding
from megapg.checkpoint.commit import Partial, check_keep
from megapg.checkpoint.directory import (
    COMMON_FILE,
    FORMAT_FILE,
    INDEX_FILE,
    CheckpointInfo,
    iteration_name,
)
from megapg.checkpoint.manifest import PARTIAL, FileSum, write_file, write_manifest
from megapg.checkpoint.optimizer_pieces import Weights, weights_of
from megapg.checkpoint.param_groups import leaves_of, merged
from megapg.checkpoint.planning import Item, State, merge_plans, partial_keys, plan_save
from megapg.checkpoint.rng_keys import Kind
from megapg.checkpoint.safe_torch import load_safely
from megapg.checkpoint.state import (
    CHECKPOINT_VERSION,
    RANK_EXTRA,
    MegatronOptimizer,
    Stateful,
    check_extra,
    check_groups,
    check_key,
    chunks_of,
    gather_parameters,
    model_state,
    not_gathered,
    prepare_parameters,
    showing,
)
from megapg.checkpoint.team import exchanging, groups_for, joint_work, layout_of, sizes_of
from megapg.checkpoint.writer import Memory, write_items
from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointError, CheckpointSaveError, RendezvousError
from megapg.layout import ParallelLayout
from megapg.megatron.core import MegatronCollection, core_version
from megapg.rendezvous.joint_work import CancelledError, JointWork, OthersFailedError
from megapg.rng import capture_rng_state, replica_field
from megapg.torch_private import StorageInfo

logger = logging.getLogger(__name__)

RngRecords: TypeAlias = Literal["both", "per_rank", "per_tp_pp"]
"""The records of random streams to write: one for every rank (Megatron's main branch since #6858),
one for each tensor and pipeline rank (read by Megatron-core up to 0.19), or both.
"""

_LAYOUTS: Mapping[RngRecords, tuple[Kind, ...]] = {
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
    rank_extra: object = None,
    num_floating_point_operations: float = 0,
    optimizer_sharding: OptimizerSharding = "fully_reshardable",
    rng_layout: RngRecords = "both",
    rng_key: str = "rng_state",
    data_parallel_random_init: bool = False,
    fully_parallel: bool = True,
    release: bool = False,
    keep: int | None = None,
    retain_every: int | None = None,
    asynchronous: bool = False,
    in_flight: int = 1,
    timeout: float | None = None,
) -> CheckpointSave:
    """Save a checkpoint that Megatron loads too. Every rank of the groups calls it.

    The checkpoint becomes visible only when it is complete. Until then the previous one stays the
    latest, whatever happens. The next save removes the files of an interrupted one.

    Args:
        directory: where the checkpoints are, seen by all ranks under one path; made if missing.
        iteration: the number of steps trained; the checkpoint is in ``iter_<7 digits>``. It
            replaces an existing one of the same number.
        model: the model, or its chunks (virtual pipeline), wrapped for data parallelism or not.
        optimizer: the result of ``get_megatron_optimizer``.
        scheduler: an ``OptimizerParamScheduler``, or another object with a ``state_dict``.
        pg_collection: the groups that model and optimizer were built with. Default: Megatron's
            globals, through :func:`megapg.resolve`.
        args: Megatron's arguments, which :func:`~megapg.load_checkpoint` returns. Megatron checks
            many of them when it loads.
        extra: more state of yours, equal on all ranks (the first rank's is saved): numbers,
            strings, containers, tensors. It is stored in Megatron's common state.
        rank_extra: this rank's own state, such as its data loader's, of the same kinds of values.
            If one rank gives it, all must; an empty dict is enough. :func:`~megapg.load_checkpoint`
            returns each rank its own, if the rank is in the same place of the job.
        num_floating_point_operations: done so far; kept for Megatron.
        optimizer_sharding: how the distributed optimizer's state is cut.
        rng_layout: the records of random streams to write; every Megatron reads "both".
        rng_key: the key of the random streams; several models in one checkpoint need one each.
        data_parallel_random_init: keep the streams of every data-parallel rank, as with Megatron's
            option of that name.
        fully_parallel: share the writing of replicated state among the data-parallel ranks.
        release: write the directory ``release`` instead, which loads as iteration 0.
        keep: how many complete checkpoints to keep, this one included. Default: all.
        retain_every: with ``keep``, iterations that are a multiple of it are kept for good, in
            addition to those that ``keep`` counts.
        asynchronous: return once the state is copied, and write in the background. Errors are
            raised by ``wait()``, by the next save or load with these groups, or when their session
            closes, which waits. Until then the memory of the copies is kept for the next save.
        in_flight: how many background saves may run at once; a further one waits for the oldest.
        timeout: seconds after which a silent rank counts as lost. Default: the session's timeout,
            or 300 for groups without a session. Megatron's few collectives during the save end
            after the groups' own ``collective_timeout``.

    Returns:
        The save. It is finished, or with ``asynchronous`` still running.

    Raises:
        CheckpointSaveError: a rank failed or died, the disk is full or read-only, or the values
            can't be saved. It is raised on every rank that lives, and names the rank and the
            reason.
        CheckpointError: arguments that make no sense.
        MissingGroupError, StaleGroupError, NoCollectionError: see :func:`megapg.resolve`.
    """
    core_version()  # older versions have other checkpoints
    pg = groups_for(pg_collection, "save_checkpoint")
    if asynchronous and pg is not pg_collection:
        raise CheckpointError(
            "asynchronous=True needs pg_collection=: pass session.groups, or a collection of "
            "megapg.from_parallel_state() that you keep, as errors come out where it is used next."
        )
    root = Path(directory).absolute()
    saves = Saves.of(pg.lease)
    saves.make_room(in_flight if asynchronous else 1)
    team = joint_work(pg, "save", timeout, background=asynchronous)
    what = f"saving {'a release' if release else f'iteration {iteration}'} to {root}"
    with _naming(what, team), team.in_one_thread(), contextlib.ExitStack() as team_ends:
        settings = {
            "directory": root,
            "iteration": iteration,
            "release": release,
            "optimizer": "none" if optimizer is None else "given",
            "optimizer_sharding": optimizer_sharding,
            "rank_extra": "none" if rank_extra is None else "given",
            "data_parallel_random_init": data_parallel_random_init,
            "fully_parallel": fully_parallel,
        }
        team.begin({name: str(value) for name, value in settings.items()})
        team_ends.enter_context(team)
        saves.raise_news()
        chunks = chunks_of(model)
        check_groups(chunks, pg)
        check_extra(extra or {})
        if in_flight < 1:
            raise CheckpointError(f"in_flight={in_flight}: how many may be under way, 1 or more.")
        if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
            raise CheckpointError(f"iteration={iteration!r}: give the number of steps, 0 or more.")
        check_keep(keep, retain_every)
        check_key(rng_key)
        if rng_layout not in _LAYOUTS:
            raise CheckpointError(f"rng_layout={rng_layout!r}: give one of {', '.join(_LAYOUTS)}.")
        metadata = optimizers.content_metadata(optimizer, sharding=optimizer_sharding)
        live = optimizers.with_groups(metadata, pg)
        shown = None if pg_collection is None else pg
        prepare_parameters(optimizer)
        model_now = model_state(chunks, live, shown)
        late = not_gathered(chunks)
        weights = weights_of(leaves_of(optimizer), late, model_now) if late else None
        must_gather = bool(late) and weights is None
        # Wait for all ranks: a rank that fails near a collective leaves the others in it.
        team.agree("arguments", wait=must_gather)
        if must_gather:
            with exchanging("parameters", team):
                gather_parameters(late)
            model_now = model_state(chunks, live, shown)
        if weights is None:
            weights = Weights([], frozenset(), model_now)
        state: State = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": iteration,
            "num_floating_point_operations_so_far": num_floating_point_operations,
            "content_metadata": metadata,
            **(extra or {}),
            **weights.rest,
        }
        if args is not None:
            state["args"] = Namespace(**args) if isinstance(args, Mapping) else args
        if scheduler is not None:
            state["opt_param_scheduler"] = scheduler.state_dict()
        optimizers.check(optimizer, metadata)
        trained = optimizers.trained(optimizer, model_now, metadata)
        gathers = optimizers.gathers(optimizer, model_now, live)
        team.agree("model", wait=gathers or data_parallel_random_init)
        pieces: list[Item] = []
        if optimizer is not None:
            with exchanging("the optimizer's state", team), showing(shown):
                state["optimizer"], pieces = optimizers.saved_state(
                    optimizer, model_now, live, gather=gathers
                )
        with exchanging("random streams", team):
            records = capture_rng_state(pg, data_parallel_random_init=data_parallel_random_init)
        streams = rng_entries.entries(records, pg, _LAYOUTS[rng_layout], key=rng_key)
        state |= {f"rng_state {number}": entry for number, entry in enumerate(streams)}
        if rank_extra is not None:
            _serialised(rank_extra, "rank_extra", "rank_extra")
            number, ranks = team.place
            state["rank_extra"] = ShardedObject(RANK_EXTRA, rank_extra, (ranks,), (number,))
        team.agree("state")
        with exchanging("names of tensors", team):
            sharing = getattr(pg, replica_field(pg)) if fully_parallel else None
            items, common = plan_save(state, sharing)
        items += weights.items + pieces
        memory = None
        if asynchronous:
            memory = saves.memory.pop() if saves.memory else Memory()
            items = memory.copies(items)
        known = _serialised(common.get("optimizer", {}), "the optimizer's state", COMMON_FILE)
        work = _Work(
            what=what,
            team=team,
            root=root,
            iteration=iteration,
            release=release,
            keep=keep,
            retain_every=retain_every,
            items=items,
            expected=weights.keys,
            trained=trained,
            optimizer=known,
            common=_serialised(common, "args, extra or the scheduler's state", COMMON_FILE)
            if team.leading
            else b"",
            layout=layout_of(pg),
            streams=rng_entries.drawn(records, pg),
            after=saves.newest,
            memory=memory,
            unused=saves.memory,
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
    """The second half of a save. It has no collectives, so it can run in the background."""

    what: str
    team: JointWork
    root: Path
    iteration: int
    release: bool
    keep: int | None
    retain_every: int | None
    items: list[Item]
    expected: Set[str]
    trained: Mapping[str, int]
    optimizer: bytes  # what this rank knows of the optimizer's common state
    common: bytes
    layout: ParallelLayout | None
    streams: rng_entries.Drawn
    after: CheckpointSave | None
    memory: Memory | None
    unused: list[Memory]

    def run(self) -> CheckpointInfo:
        """Write, report, and if this rank leads, publish.

        Raises:
            CheckpointSaveError: here or on another rank.
        """
        started = time.monotonic()
        # Undone last: the others must get the error before they miss the directory.
        ending = contextlib.ExitStack()
        with _naming(self.what, self.team), self.team.in_one_thread(), ending as undo, self.team:
            team = self.team
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
                places, sums = write_items(here, team.rank, self.items, team.progress, team.busy)
            except (OSError, CheckpointSaveError):
                team.heed()
                raise
            plan = [item for item, _ in self.items]
            report = plan, places, sums, self.streams, self.expected, self.trained, self.optimizer
            self.items = []
            if self.memory is not None:
                self.unused.append(self.memory)
            reports = team.collect("written", pickle.dumps(report), final=True)
            if partial is not None:
                sums = self._complete(partial.path, reports)
                while self.after is not None and not self.after.join(0.1):
                    team.progress()  # an older save must not make itself the latest after this one
                team.heed()
                with team.busy():
                    info = partial.publish(self.keep, retain_every=self.retain_every)
                undo.pop_all()
                team.announce("published", pickle.dumps(info))
                size = sum(each.size or 0 for each in sums.values())
                seconds = time.monotonic() - started
                logger.info("%s: %.1f MiB in %.1f s", self.what, size / 2**20, seconds)
                return info
            published: CheckpointInfo = pickle.loads(team.announce("published"))
            return published

    def _complete(self, here: Path, reports: Mapping[int, bytes]) -> dict[str, FileSum]:
        """Add the files that exist once: metadata, common state, manifest."""
        plans: dict[int, list[WriteItem]] = {}
        places: dict[int, list[StorageInfo]] = {}
        sums: dict[str, FileSum] = {}
        streams: list[rng_entries.Drawn] = []
        expected: set[str] = set()
        trained: Counter[str] = Counter()
        optimizers: dict[bytes, int] = {}  # the same on most ranks
        for rank, report in reports.items():
            plans[rank], places[rank], files, drawn, keys, weights, known = pickle.loads(report)
            expected |= keys
            trained.update(weights)
            optimizers.setdefault(known, rank)
            streams.append(drawn)
            sums |= files
            for name, known in files.items():
                _check_arrived(here / name, known.size, rank)
        metadata = merge_plans(
            plans, places, iteration_name(self.iteration), weights=expected, trained=trained
        )
        for name, data in (
            (INDEX_FILE, pickle.dumps(metadata)),
            (COMMON_FILE, self._common(optimizers)),
            (FORMAT_FILE, json.dumps(_FORMAT).encode()),
        ):
            sums[name] = write_file(here / name, data)
        about = {
            "version": __version__,
            "iteration": self.iteration,
            "layout": None if self.layout is None else sizes_of(self.layout),
            rng_entries.ALIKE: rng_entries.drew_alike(streams),
            PARTIAL: partial_keys(metadata),
        }
        write_manifest(here, sums, about)
        return sums

    def _common(self, optimizers: Mapping[bytes, int]) -> bytes:
        """Return the common state, with what all ranks know of the optimizer's."""
        if len(optimizers) < 2:
            return self.common
        common = load_safely(self.common, COMMON_FILE)
        states = {rank: load_safely(known, COMMON_FILE) for known, rank in optimizers.items()}
        common["optimizer"] = merged(states)  # type: ignore[index, arg-type]
        return _serialised(common, "the optimizer's state", COMMON_FILE)


# Contents of metadata.json. Megatron-core 0.19 reads the first two, earlier versions all.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _serialised(value: object, what: str, name: str) -> bytes:
    """Return the bytes that ``torch.save`` makes of a value, and check that they load safely."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        load_safely(buffer.getvalue(), name)
    except Exception as error:
        raise CheckpointSaveError(
            f"{what} can't be saved so that it loads safely: {error} Give plain values: numbers, "
            "strings, containers, tensors."
        ) from error
    return buffer.getvalue()


def _check_shared(here: Path) -> None:
    if not here.is_dir():
        raise CheckpointSaveError(
            f"{here} was made by the first rank, and {socket.gethostname()} does not see it. Save "
            "to a file system that all hosts share, under one path."
        )


def _check_arrived(file: Path, size: int | None, rank: int) -> None:
    found = file.stat().st_size if file.exists() else None
    if found != size:
        raise CheckpointSaveError(
            f"rank {rank} wrote {file.name} with {size} bytes, and the first rank sees "
            f"{'none of it' if found is None else f'{found} bytes'} at {file.parent}. Save to a "
            "file system that all hosts share, under one path."
        )


@contextlib.contextmanager
def _naming(what: str, team: JointWork) -> Iterator[None]:
    """Add what was being saved to errors. The last checkpoint is safe in every case."""
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
