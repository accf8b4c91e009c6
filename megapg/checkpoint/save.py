"""Saving a checkpoint: :func:`save_checkpoint`.

A save has two halves. :class:`~megapg.checkpoint.save_state.SaveState` gathers the state, with
collectives. :class:`~megapg.checkpoint.save_write.Write` writes it, and may run in the background.
The ranks then communicate over the store, so a rank that dies leaves no other rank hanging. The
docstrings of the two classes list the steps.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megapg.checkpoint.background import CheckpointSave, Saves
from megapg.checkpoint.can_reshard import OptimizerSharding
from megapg.checkpoint.save_state import Asked, RngRecords, SaveState
from megapg.checkpoint.save_write import naming
from megapg.checkpoint.state import (
    MegatronOptimizer,
    Stateful,
)
from megapg.checkpoint.team import groups_for, joint_work
from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointError
from megapg.megatron.core import MegatronCollection, core_version


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
    asked = Asked(
        root=Path(directory).absolute(),
        iteration=iteration,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        pg=pg,
        shown=None if pg_collection is None else pg,
        args=args,
        extra=extra or {},
        rank_extra=rank_extra,
        num_floating_point_operations=num_floating_point_operations,
        optimizer_sharding=optimizer_sharding,
        rng_layout=rng_layout,
        rng_key=rng_key,
        data_parallel_random_init=data_parallel_random_init,
        fully_parallel=fully_parallel,
        release=release,
        keep=keep,
        retain_every=retain_every,
        in_flight=in_flight,
    )
    saves = Saves.of(pg.lease)
    saves.make_room(in_flight if asynchronous else 1)
    team = joint_work(pg, "save", timeout, background=asynchronous)
    with naming(asked.title, team), team.in_one_thread(), contextlib.ExitStack() as team_ends:
        team.begin(asked.settings())
        team_ends.enter_context(team)
        saves.raise_news()
        state = SaveState(asked, team)
        state.check()
        state.describe()
        state.collect()
        write = state.share(saves, copied=asynchronous)
        team_ends.pop_all()  # the team goes on in the second half
    save = CheckpointSave(asked.root, iteration, write.run, team.cancel)
    if asynchronous:
        saves.add(save)
    else:
        save.run()
    return save
