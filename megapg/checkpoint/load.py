"""Loading a checkpoint, under the layout it was saved with or another: :func:`load_checkpoint`."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from typing_extensions import override

from megapg import errors
from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import scheduler as schedulers
from megapg.checkpoint.background import Saves
from megapg.checkpoint.can_reshard import check_reshard
from megapg.checkpoint.choice import (
    OF_THE_CHECKPOINT,
    Changes,
    Choice,
    are_of_the_checkpoint,
    identity,
)
from megapg.checkpoint.contents import Contents, read_contents
from megapg.checkpoint.directory import RELEASE
from megapg.checkpoint.entries import is_of_optimizer
from megapg.checkpoint.param_groups import fit
from megapg.checkpoint.planning import Loading, State
from megapg.checkpoint.restore import reload_weights, restore
from megapg.checkpoint.rng_entries import ALIKE, RngReport, record_for_this_rank
from megapg.checkpoint.rng_keys import KEY, detect
from megapg.checkpoint.state import (
    KNOWN,
    RANK_EXTRA,
    MegatronOptimizer,
    Stateful,
    check_groups,
    check_key,
    chunks_of,
    is_model,
    load_model,
    model_state,
    scheduler_state,
    showing,
    vocabularies_of,
)
from megapg.checkpoint.team import exchanging, groups_for, joint_work, layout_of
from megapg.checkpoint.verify import verify as verify_files
from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    RendezvousError,
)
from megapg.layout import ParallelLayout
from megapg.megatron.core import MegatronCollection, core_version
from megapg.rendezvous.error_texts import brief
from megapg.rendezvous.joint_work import JointWork, OthersFailedError
from megapg.rng import RngState, restore_rng_state

logger = logging.getLogger(__name__)

_RANK_EXTRA = f"{RANK_EXTRA}/shard_"
_PLACING = ("tp", "cp", "pp", "order")  # the rank's place in the data and in the pipeline
_RERUN = "rerun_state_machine_state"  # for Megatron's own use


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
    saves = Saves.of(pg.lease)
    saves.make_room(1)
    choice = Choice(Path(directory).absolute(), iteration)
    while True:
        team, changes = joint_work(pg, "load", timeout), Changes()
        with _again_if_replaced(choice, team), changes, _naming(f"loading {choice}", team):
            started = time.monotonic()
            settings = {
                "checkpoint": choice,
                "strict": strict,
                "optimizer": "none" if optimizer is None else "given",
                "weights_only": weights_only,
                "load_optimizer": load_optimizer,
                "load_scheduler": load_scheduler,
            }
            team.begin({name: str(value) for name, value in settings.items()})
            with team:
                saves.raise_news()
                check_key(rng_key)
                chunks = chunks_of(model)
                check_groups(chunks, pg)
                if team.leading:
                    found = choice.make()
                    if verify:
                        _verify(found.path, team)
                    chosen = {"path": str(found.path), "fallback": choice.fallback}
                    team.announce("directory", json.dumps(chosen).encode())
                else:
                    chosen = json.loads(team.announce("directory"))
                path = Path(chosen["path"])
                here = identity(path)
                contents = read_contents(path, check=verify is not False)
                release = path.name == RELEASE
                whole = not (weights_only or release)
                layout = layout_of(pg)
                restored = optimizer if load_optimizer and whole else None
                live = optimizers.with_groups(contents.content_metadata, pg)
                shown = None if pg_collection is None else pg
                if restored is not None:
                    _check_optimizer(contents, layout, chunks)
                    optimizers.check(restored, live)
                state: State = dict(model_state(chunks, live, shown))
                common = copy.deepcopy(dict(contents.common))
                if restored is not None:
                    saved = common.get("optimizer", {})
                    common["optimizer"] = fit(restored, saved)  # type: ignore[arg-type]
                schedule = None
                if scheduler is not None and load_scheduler and whole:
                    schedule = scheduler_state(contents.common)
                    schedulers.check(scheduler, schedule)
                # Wait for all ranks: a rank that fails near a collective leaves the others in it.
                team.agree("model")
                if restored is not None:
                    with exchanging("the optimizer's state", team), showing(shown):
                        state["optimizer"] = optimizers.wanted_state(restored, state, metadata=live)
                loading = Loading(
                    state, contents, strict=strict, vocabularies=vocabularies_of(chunks)
                )
                record, report = None, None
                if rng and whole:
                    record, report = _random_streams(contents, pg, rng_key)
                if loading.resized and team.leading:
                    logger.warning(
                        "%s: other sizes were saved of %s; what is new is zero, what is beyond the "
                        "end is left out",
                        path,
                        ", ".join(f"{key} {shape}" for key, shape in loading.resized.items()),
                    )
                rank_extra, rank_extra_lost = _rank_extra(contents, layout, team)
                unexpected = _unexpected(contents, loading, restored is not None, team)
                # All ranks have come here, and from here on weights change.
                changes.begun = True
                with _progress(path, contents, layout, team) as progress:
                    state = loading.read(common, progress)
                if identity(path) not in (here, None):
                    raise BrokenCheckpointError(
                        f"{path} was replaced while it was read. Load again."
                    )
                load_model(chunks, state, strict=strict and not loading.missing)
                team.agree("read")
                with exchanging("the optimizer's state", team):
                    if restored is not None:
                        restore(restored, state["optimizer"])  # type: ignore[arg-type]
                    else:
                        reload_weights(optimizer)
                if scheduler is not None and schedule is not None:
                    # Last, as in Megatron: it may be configured to ignore the saved learning rates.
                    schedulers.restore(scheduler, schedule)
                if record is not None:
                    restore_rng_state([record], pg)
                team.agree("loaded")
            logger.info("loaded %s in %.1f s", path, time.monotonic() - started)
            args = common.get("args")
            operations = common.get("num_floating_point_operations_so_far", 0)
            return LoadedCheckpoint(
                path=path,
                iteration=0 if release else contents.iteration or 0,
                release=release,
                args=args if isinstance(args, Namespace) else None,
                extra={
                    k: v for k, v in contents.common.items() if k not in KNOWN and not is_model(k)
                },
                num_floating_point_operations=(
                    operations if isinstance(operations, int | float) else 0
                ),
                missing=tuple(sorted(loading.missing)),
                unexpected=unexpected,
                resized=loading.resized,
                rng=report,
                rank_extra=rank_extra,
                rank_extra_lost=rank_extra_lost,
                fallback=chosen["fallback"],
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


def _verify(path: Path, team: JointWork) -> None:
    report = verify_files(path, on_progress=lambda *_: team.progress())
    if report.problems:
        raise BrokenCheckpointError(
            f"{path} is damaged: {'; '.join(map(str, report.problems[:8]))}. Take it from a copy, "
            "or load an older one with iteration=.",
            [str(problem) for problem in report.problems],
        )


def _check_optimizer(
    contents: Contents, layout: ParallelLayout | None, chunks: Sequence[torch.nn.Module]
) -> None:
    """Check that the checkpoint has an optimizer state that can be cut for this layout."""
    keys = contents.metadata.state_dict_metadata
    if "optimizer" not in contents.common and not any(k.startswith("optimizer.") for k in keys):
        raise CheckpointMismatchError(
            f"{contents.path} has no optimizer state. Load it with weights_only=True. Nothing was "
            "changed."
        )
    has_experts = any(
        not getattr(parameter, "allreduce", True)  # Megatron-core's mark of experts
        for chunk in chunks
        for parameter in chunk.parameters()
    )
    check_reshard(contents.content_metadata, contents.saved_layout(), layout, has_experts)


def _random_streams(
    contents: Contents, pg: ProcessGroupCollection, key: str
) -> tuple[RngState | None, RngReport | None]:
    prefix, _, module = key.partition(KEY)
    named = None if key == KEY else prefix
    layouts = detect(contents.keys(), prefix=named, module=module.removeprefix(".") or None)
    if not layouts and key == KEY:
        return None, None
    if not layouts:
        raise CheckpointMismatchError(
            f"{contents.path} has no random streams under {key}. Name another rng_key, or load "
            "without them (rng=False)."
        )
    return record_for_this_rank(
        layouts,
        contents.read_object,
        pg,
        saved=contents.saved_layout(),
        alike=alike if isinstance(alike := contents.about.get(ALIKE), bool) else None,
        iteration=contents.iteration or 0,
        stacklevel=4,  # the caller of load_checkpoint
    )


def _rank_extra(
    contents: Contents, layout: ParallelLayout | None, team: JointWork
) -> tuple[object, str]:
    """Return the value that this rank saved for itself, and why it is lost if it is."""
    number, ranks = team.place
    kept = [key for key in contents.metadata.state_dict_metadata if key.startswith(_RANK_EXTRA)]
    of = {key.rpartition("_")[2] for key in kept}
    if not of:
        return None, ""
    saved = contents.saved_layout()
    if of != {str(ranks)}:
        why = f"it was saved by {' or '.join(sorted(of))} ranks, and now they are {ranks}"
    elif saved is None or layout is None:
        when = "it was saved under" if saved is None else "these groups make"
        why = f"the layout that {when} is not known"
    elif any(getattr(saved, name) != getattr(layout, name) for name in _PLACING):
        why = f"it was saved under {_cut(saved)}, and now the ranks are {_cut(layout)}"
    else:
        return contents.read_object(f"{_RANK_EXTRA}{number}_{ranks}"), ""
    if team.leading:
        logger.warning("%s: rank_extra is not handed back, as %s", contents.path, why)
    return None, why


def _unexpected(
    contents: Contents, loading: Loading, with_optimizer: bool, team: JointWork
) -> tuple[str, ...]:
    """Return the keys of the loaded parts that no rank reads. All ranks must call it."""
    saved = contents.metadata.state_dict_metadata
    keys = [key for key in saved if _is_looked_for(key, with_optimizer)]
    stamp = zlib.crc32(repr(keys).encode()).to_bytes(4, "big")
    mine = np.packbits([key in loading.keys for key in keys]).tobytes()
    reports, encoded = team.collect("fits", stamp + mine), b""
    if team.leading:
        if {report[:4] for report in reports.values()} != {stamp}:
            raise BrokenCheckpointError(
                f"{contents.path} is not the same on all ranks: it was replaced while it was read, "
                "or they see different file systems. Load again."
            )
        read = np.zeros(len(mine), np.uint8)
        for report in reports.values():
            read |= np.frombuffer(report[4:], np.uint8)
        flags = np.unpackbits(read, count=len(keys))
        left = [key for key, flag in zip(keys, flags, strict=True) if not flag]
        if left:
            more = f" and {len(left) - 4} more" if len(left) > 4 else ""
            named = ", ".join(left[:4]) + more
            logger.warning("%s has what no rank has a place for: %s", contents.path, named)
        encoded = json.dumps(left).encode()
    return tuple(json.loads(team.announce("unexpected", encoded)))


def _is_looked_for(key: str, with_optimizer: bool) -> bool:
    if KEY in key or key.partition("/")[0] in (*KNOWN, RANK_EXTRA, _RERUN):
        return False
    return with_optimizer or not is_of_optimizer(key)


@contextlib.contextmanager
def _progress(
    path: Path, contents: Contents, layout: ParallelLayout | None, team: JointWork
) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that reports the reading progress to the other ranks.

    The first rank also shows a progress bar on its terminal.
    """
    saved = contents.saved_layout()
    doing = f"loading {path.name}"
    if saved is not None and layout is not None and (then := _cut(saved)) != (now := _cut(layout)):
        doing += f", {then} as {now}"
        if team.leading:
            logger.info("%s", doing)
    if not team.leading or not sys.stderr.isatty():
        yield lambda done, size: team.progress()
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(doing)

        def progress(done: int, size: int) -> None:
            team.progress()
            line.update(task, completed=done, total=size)

        yield progress


def _cut(layout: ParallelLayout) -> str:
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp}
    return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"


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
