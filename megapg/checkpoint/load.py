"""Loading a checkpoint, under the layout it was saved with or another: :func:`load_checkpoint`.

:class:`~megapg.checkpoint.load_steps.Load` has the steps in order. An attempt whose checkpoint
another job removes or replaces meanwhile is made again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from megapg import errors
from megapg.checkpoint.background import Saves
from megapg.checkpoint.choice import (
    OF_THE_CHECKPOINT,
    Changes,
    Choice,
    are_of_the_checkpoint,
)
from megapg.checkpoint.load_steps import Asked, Load
from megapg.checkpoint.rng_entries import RngReport
from megapg.checkpoint.state import (
    KNOWN,
    MegatronOptimizer,
    Stateful,
    is_model,
)
from megapg.checkpoint.team import groups_for, joint_work
from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    CheckpointError,
    RendezvousError,
)
from megapg.megatron.core import MegatronCollection, core_version
from megapg.rendezvous.error_texts import brief
from megapg.rendezvous.joint_work import JointWork, OthersFailedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of a load, apart from what is now in model, optimizer and scheduler.

    Attributes:
        path: the directory of the checkpoint.
        iteration: the number of steps trained; 0 for a release.
        release: True if it is a release.
        args: the arguments that were saved with it, if any were.
        extra: the other values of the common state: those that the user saved, or those that
            Megatron saved.
        num_floating_point_operations: done when it was saved.
        missing: keys that the checkpoint lacked (``strict=False``).
        unexpected: keys of the checkpoint that no rank has a place for, within the parts that were
            loaded (the model, the optimizer).
        resized: key -> its shape in the checkpoint, for tensors that may differ in shape. An
            example is a vocabulary, whose padding depends on the tensor parallel size.
        rng: whether this rank's random streams continue exactly, and why; None if none were
            restored.
        rank_extra: the value that this rank gave to ``save_checkpoint(rank_extra=)``; None if none
            was given, or if this rank is in another place of the job now.
        rank_extra_lost: why an existing value is not returned; empty otherwise.
        fallback: why an older checkpoint was loaded than the one that the tracker names; empty if
            it was not. The same on all ranks.
    """

    path: Path
    iteration: int
    release: bool
    args: Namespace | None
    extra: Mapping[str, object]
    num_floating_point_operations: float
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    resized: Mapping[str, tuple[int, ...]]
    rng: RngReport | None
    rank_extra: object
    rank_extra_lost: str
    fallback: str

    @override
    def __str__(self) -> str:
        """Return a line for what was loaded, and a line for each loss or difference."""
        lines = [f"{self.path}: {'a release' if self.release else f'iteration {self.iteration}'}"]
        rest = {
            "missing": ", ".join(self.missing),
            "unexpected": ", ".join(self.unexpected),
            "resized": ", ".join(self.resized),
            "rng": self.rng.reason if self.rng else "",
            "rank_extra_lost": self.rank_extra_lost,
            "fallback": self.fallback,
        }
        return "\n".join([*lines, *(f"  {name}: {text}" for name, text in rest.items() if text)])


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Sequence[torch.nn.Module] | torch.nn.Module,
    optimizer: MegatronOptimizer | None = None,
    scheduler: Stateful | None = None,
    pg_collection: ProcessGroupCollection | MegatronCollection | None = None,
    iteration: int | None = None,
    strict: bool = True,
    verify: bool | None = None,
    weights_only: bool = False,
    load_optimizer: bool = True,
    load_scheduler: bool = True,
    rng: bool = True,
    rng_key: str = "rng_state",
    timeout: float | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint of megapg or Megatron into model, optimizer, scheduler and random streams.

    Every rank of the groups calls it. The layout may differ from the one it was saved under. Every
    rank makes all its checks before the first weight changes. If another job removes or replaces
    the latest checkpoint during the load, the new latest one is loaded.

    Args:
        directory: where the checkpoints are; the latest is loaded. Or the directory of one.
        model: the model or its chunks, as for :func:`~megapg.save_checkpoint`.
        optimizer: the result of ``get_megatron_optimizer``. If you have one, pass it, also with
            ``weights_only``: it has its own copy of the weights.
        scheduler: None leaves it alone.
        pg_collection: the groups that model and optimizer were built with. Default: Megatron's
            globals, through :func:`megapg.resolve`.
        iteration: the iteration to load. Default: the latest.
        strict: refuse a checkpoint that lacks a part of the model. If False, that part stays as it
            is.
        verify: whether to check that the files are as they were saved. By default, each rank checks
            what it reads. True reads every file first, and so changes nothing if a file is damaged.
            False checks only names, sizes and shapes.
        weights_only: load only the weights, for fine-tuning. The optimizer takes them over. Its
            moments, the scheduler and the random streams stay as they are.
        load_optimizer: restore the optimizer's own state. If False, the optimizer takes over the
            loaded weights.
        load_scheduler: restore the scheduler.
        rng: restore the random streams.
        rng_key: the key of the random streams in the checkpoint.
        timeout: seconds after which a silent rank counts as lost. Default: the session's timeout,
            or 300 for groups without a session. Megatron's few collectives during the load end
            after the groups' own ``collective_timeout``.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or none of this iteration.
        CheckpointMismatchError: it does not fit the model, or can't be cut for this layout. Nothing
            was changed.
        BrokenCheckpointError: a file is damaged. If parts were read before, a note says so.
        UnsafeCheckpointError: it would run code. Nothing of it was run.
        CheckpointError: another rank failed; it is named.
        MissingGroupError, StaleGroupError, NoCollectionError: see :func:`megapg.resolve`.
    """
    core_version()  # older versions have other checkpoints
    pg = groups_for(pg_collection, "load_checkpoint")
    asked = Asked(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        pg=pg,
        shown=None if pg_collection is None else pg,
        strict=strict,
        verify=verify,
        weights_only=weights_only,
        load_optimizer=load_optimizer,
        load_scheduler=load_scheduler,
        rng=rng,
        rng_key=rng_key,
    )
    saves = Saves.of(pg.lease)
    saves.make_room(1)
    choice = Choice(Path(directory).absolute(), iteration)
    while True:
        team, changes = joint_work(pg, "load", timeout), Changes()
        with _again_if_replaced(choice, team), changes, _naming(f"loading {choice}", team):
            started = time.monotonic()
            team.begin(asked.settings(choice))
            with team:
                saves.raise_news()
                load = Load(asked, team)
                load.choose(choice)
                load.check()
                load.ask_the_optimizer()
                load.fit()
                changes.begun = True  # all ranks have come here: from here on weights change
                load.read()
                load.apply()
            logger.info("loaded %s in %.1f s", load.path, time.monotonic() - started)
            return _result(load)


def _result(load: Load) -> LoadedCheckpoint:
    contents, common = load.contents, load.common
    args = common.get("args")
    operations = common.get("num_floating_point_operations_so_far", 0)
    return LoadedCheckpoint(
        path=load.path,
        iteration=0 if load.release else contents.iteration or 0,
        release=load.release,
        args=args if isinstance(args, Namespace) else None,
        extra={k: v for k, v in contents.common.items() if k not in KNOWN and not is_model(k)},
        num_floating_point_operations=operations if isinstance(operations, int | float) else 0,
        missing=tuple(sorted(load.loading.missing)),
        unexpected=load.unexpected,
        resized=load.loading.resized,
        rng=load.rng_report,
        rank_extra=load.rank_extra,
        rank_extra_lost=load.rank_extra_lost,
        fallback=load.fallback,
    )


@contextlib.contextmanager
def _again_if_replaced(choice: Choice, team: JointWork) -> Iterator[None]:
    """Suppress the error of an attempt to load if all ranks are to try again."""
    try:
        yield
    except CheckpointError as error:
        known: Iterable[str] = [brief(error)]
        if isinstance(others := error.__cause__, OthersFailedError):
            known = others.problems.values()
        # All ranks must decide alike, whichever of these errors they have.
        asking = team.leading or are_of_the_checkpoint(known)
        if not asking or not team.verdict(choice.is_worth_another):
            raise
    except BaseException:
        if team.leading:
            team.verdict(lambda troubles: False)
        raise


@contextlib.contextmanager
def _naming(what: str, team: JointWork) -> Iterator[None]:
    """Add what was being done to the errors of other ranks."""
    try:
        yield
    except OthersFailedError as error:
        # Raise the same class as on the other rank, if it is megapg's.
        names = {text.partition(":")[0] for text in error.problems.values()}
        kind = (
            getattr(errors, names.pop()) if names <= OF_THE_CHECKPOINT and len(names) == 1 else None
        )
        said = str(error).rstrip(".")
        raise (kind or CheckpointError)(f"{what} failed: {said}.") from error
    except RendezvousError as error:
        said = f"{what} failed: {error} Every rank has to call it, with the same arguments."
        raise CheckpointError(said) from error
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{what} failed on rank {team.rank}: {error}.") from error
