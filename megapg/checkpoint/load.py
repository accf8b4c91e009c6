"""Loading a checkpoint, under the layout it was saved with or another: :func:`load_checkpoint`."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from megapg import errors
from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint.contents import Contents, read_contents
from megapg.checkpoint.groups import exchanging, layout_of, teamwork
from megapg.checkpoint.manifest import verify as verify_files
from megapg.checkpoint.names import (
    INDEX_FILE,
    RELEASE,
    CheckpointInfo,
    find,
    iteration_name,
    latest,
    list_checkpoints,
)
from megapg.checkpoint.planning import Loading, State
from megapg.checkpoint.rng_records import KEY, NEEDS, RngReport, detect, record_for_this_rank
from megapg.checkpoint.saves import Saves
from megapg.checkpoint.state import (
    KNOWN,
    MegatronOptimizer,
    Stateful,
    check_groups,
    check_key,
    chunks_of,
    is_model,
    load_model,
    model_state,
    scheduler_state,
)
from megapg.collection import ProcessGroupCollection
from megapg.comms.teamwork import OthersFailedError, Teamwork
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    RendezvousError,
)
from megapg.layout import ParallelLayout
from megapg.megatron import resolve
from megapg.megatron.core import MegatronCollection
from megapg.rng import RngState, restore_rng_state

logger = logging.getLogger(__name__)

_SHARED = (
    "BrokenCheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "UnsafeCheckpointError",
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded, besides what is now in the model, the optimizer and the scheduler.

    Attributes:
        path: the directory it came from.
        iteration: the number of steps trained; 0 for a release.
        release: whether it is a release.
        args: the arguments that were saved with it, if any were.
        extra: what else was saved; with Megatron's own checkpoints whatever it kept there.
        num_floating_point_operations: done when it was saved.
        missing: keys that the checkpoint lacked (``strict=False``).
        resized: key -> its shape in the checkpoint, where Megatron lets it differ from the model's:
            of a vocabulary, which is padded otherwise for another tensor parallel size.
        rng: whether this rank's random streams go on exactly where they were, or why not; None
            where none were restored.
    """

    path: Path
    iteration: int
    release: bool
    args: Namespace | None
    extra: Mapping[str, object]
    num_floating_point_operations: float
    missing: tuple[str, ...]
    resized: Mapping[str, tuple[int, ...]]
    rng: RngReport | None


def load_checkpoint(
    directory: str | os.PathLike[str],
    *,
    model: Sequence[torch.nn.Module] | torch.nn.Module,
    optimizer: MegatronOptimizer | None = None,
    scheduler: Stateful | None = None,
    pg_collection: ProcessGroupCollection | MegatronCollection | None = None,
    iteration: int | None = None,
    strict: bool = True,
    verify: bool = False,
    weights_only: bool = False,
    rng: bool = True,
    rng_key: str = "rng_state",
    timeout: float = 300.0,
) -> LoadedCheckpoint:
    """Load a checkpoint of megapg's or Megatron's into model, optimizer, scheduler and random
    streams. Every rank of the groups calls it.

    The layout may be another than it was saved under. Everything that can be checked is checked on
    every rank before the first weight changes.

    Args:
        directory: where the checkpoints are; the latest is loaded. Or the directory of one.
        model: the model or its chunks, as for :func:`~megapg.save_checkpoint`.
        optimizer: what ``get_megatron_optimizer`` returned. If you have one, pass it, also with
            ``weights_only``: it keeps the weights once more.
        scheduler: None leaves it alone.
        pg_collection: the groups that model and optimizer were built with. Left out, they come from
            Megatron's globals through :func:`megapg.resolve`.
        iteration: which one, if not the latest.
        strict: refuse a checkpoint that lacks something the model has; otherwise leave it as it is.
        verify: read every file first and compare checksums.
        weights_only: for fine-tuning: nothing but the weights, which the optimizer takes over as
            its own; its moments, the scheduler and the random streams stay as they are.
        rng: whether to restore the random streams.
        rng_key: what the random streams were kept under.
        timeout: seconds of silence after which another rank is given up. The few collectives of
            Megatron's on the way end after the groups' own ``collective_timeout``.

    Raises:
        CheckpointNotFoundError: there is none, or not of this iteration.
        CheckpointMismatchError: it does not fit the model, or can't be cut for this layout. Nothing
            was changed.
        BrokenCheckpointError: a file is damaged. What was read before that is in the model.
        UnsafeCheckpointError: it would run code. Nothing of it was run.
        CheckpointError: another rank failed; it is named.
        MissingGroupError, StaleGroupError, NoCollectionError: see :func:`megapg.resolve`.
    """
    pg = resolve(pg_collection, needs=NEEDS, owner="load_checkpoint")
    saves = Saves.of(pg.lease)
    saves.make_room(1)
    root = Path(directory).absolute()
    which = "the latest" if iteration is None else f"iteration {iteration}"
    team = teamwork(pg, "load", timeout)
    started = time.monotonic()
    with _naming(f"loading {which} from {root}", team):
        settings = {
            "directory": root,
            "iteration": which,
            "strict": strict,
            "optimizer": "none" if optimizer is None else "given",
            "weights_only": weights_only,
        }
        team.begin({name: str(value) for name, value in settings.items()})
        with team, contextlib.ExitStack() as undo:
            saves.raise_news()
            check_key(rng_key)
            chunks = chunks_of(model)
            check_groups(chunks, pg)
            if team.leading:
                found = _find(root, iteration)
                if verify:
                    _verify(found.path, team)
                team.announce("directory", str(found.path).encode())
                path = found.path
            else:
                path = Path(team.announce("directory").decode())
            contents = read_contents(path)
            release = path.name == RELEASE
            weights_only = weights_only or release
            layout = layout_of(pg)
            with_optimizer = not weights_only and _wants_optimizer(optimizer, contents)
            if with_optimizer:
                optimizers.check_reshard(
                    contents.content_metadata, contents.saved_layout(), layout, _has_experts(chunks)
                )
            live = optimizers.with_groups(contents.content_metadata, pg)
            state: State = dict(model_state(chunks, live))
            common = copy.deepcopy(dict(contents.common))
            if optimizer is not None and with_optimizer:
                saved = common.get("optimizer", {})
                common["optimizer"] = optimizers.fit(optimizer, saved)  # type: ignore[arg-type]
            if scheduler is not None and not weights_only:
                undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
                scheduler.load_state_dict(scheduler_state(common))  # it may refuse
            # A rank that fails beside a collective leaves the others in it: first all come here.
            team.agree("model")
            if optimizer is not None and with_optimizer:
                with exchanging("the optimizer's state", team):
                    state["optimizer"] = optimizers.sharded_state(
                        optimizer, state, is_loading=True, metadata=live
                    )
            loading = Loading(state, contents, strict=strict)
            if any(key.startswith("optimizer.") for key in loading.missing):
                raise CheckpointMismatchError(
                    f"{path} lacks part of the optimizer's state, as the model has more than was "
                    "saved. Load it with weights_only=True. Nothing was changed."
                )
            record, report = None, None
            if rng and not weights_only:
                record, report = _random_streams(contents, pg, rng_key)
            if loading.resized and team.leading:
                logger.warning(
                    "%s: other sizes were saved of %s; what is new is zero, what is beyond the end "
                    "is left out",
                    path,
                    ", ".join(f"{key} {shape}" for key, shape in loading.resized.items()),
                )
            team.agree("fits")  # from here on weights change
            undo.pop_all()
            with _progress(path, contents, layout, show=team.leading) as show:

                def progress(done: int, size: int) -> None:
                    team.progress()
                    show(done, size)

                state = loading.read(common, progress)
            load_model(chunks, state, strict=strict and not loading.missing)
            team.agree("read")
            with exchanging("the optimizer's state", team):
                if optimizer is not None and with_optimizer:
                    optimizers.restore(optimizer, state["optimizer"])  # type: ignore[arg-type]
                elif optimizer is not None:
                    optimizer.reload_model_params()
            if record is not None:
                restore_rng_state([record], pg)
            team.agree("loaded")
    logger.info("loaded %s in %.1f s", path, time.monotonic() - started)
    args = common.get("args")
    return LoadedCheckpoint(
        path=path,
        iteration=0 if release else contents.iteration or 0,
        release=release,
        args=args if isinstance(args, Namespace) else None,
        extra={k: v for k, v in contents.common.items() if k not in KNOWN and not is_model(k)},
        num_floating_point_operations=_number(common, "num_floating_point_operations_so_far"),
        missing=tuple(sorted(loading.missing)),
        resized=loading.resized,
        rng=report,
    )


def _find(root: Path, iteration: int | None) -> CheckpointInfo:
    if (root / INDEX_FILE).exists():  # the directory of one
        if iteration is not None and root.name != iteration_name(iteration):
            raise CheckpointNotFoundError(
                f"{root} is a checkpoint itself, and not that of step {iteration}. Leave iteration "
                "out, or give the directory above."
            )
        return CheckpointInfo(path=root, iteration=0, release=root.name == RELEASE, complete=True)
    found = latest(root) if iteration is None else find(root, iteration_name(iteration))
    if found is None or not found.complete:
        if not root.is_dir():
            raise CheckpointNotFoundError(f"there is no directory {root}.")
        named = [c for c in list_checkpoints(root) if not c.path.name.startswith(".")]
        bad = [c for c in named if not c.complete and iteration in (None, c.iteration)]
        if bad and not (iteration is None and any(c.complete for c in named)):
            problems = [f"{c.path.name} {c.problem}" for c in bad]
            raise BrokenCheckpointError(
                f"{root}: {'; '.join(problems[-4:])}. Take it from a copy, or load another with "
                "iteration=.",
                problems,
            )
        have = ", ".join(c.path.name for c in list_checkpoints(root) if c.complete)
        which = "complete checkpoint" if iteration is None else f"checkpoint of step {iteration}"
        rest = f" It has {have}." if have else ""
        raise CheckpointNotFoundError(f"{root} has no {which}.{rest}")
    return found


def _verify(path: Path, team: Teamwork) -> None:
    report = verify_files(path, on_progress=lambda *_: team.progress())
    if report.problems:
        raise BrokenCheckpointError(
            f"{path} is damaged: {'; '.join(map(str, report.problems[:8]))}. Take it from a copy, "
            "or load an older one with iteration=.",
            [str(problem) for problem in report.problems],
        )


def _wants_optimizer(optimizer: MegatronOptimizer | None, contents: Contents) -> bool:
    if optimizer is None:
        return False
    if "optimizer" in contents.common or _has_keys(contents, "optimizer."):
        return True
    raise CheckpointMismatchError(
        f"{contents.path} has no optimizer state. Load it with weights_only=True. Nothing was "
        "changed."
    )


def _has_keys(contents: Contents, start: str) -> bool:
    return any(key.startswith(start) for key in contents.metadata.state_dict_metadata)


def _has_experts(chunks: Sequence[torch.nn.Module]) -> bool:
    return any(
        not getattr(parameter, "allreduce", True)  # how Megatron-core marks those of experts
        for chunk in chunks
        for parameter in chunk.parameters()
    )


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
        iteration=contents.iteration or 0,
        stacklevel=4,
    )


def _number(state: Mapping[str, object], name: str) -> float:
    found = state.get(name, 0)
    return found if isinstance(found, int | float) else 0


@contextlib.contextmanager
def _progress(
    path: Path, contents: Contents, layout: ParallelLayout | None, *, show: bool
) -> Iterator[Callable[[int, int], None]]:
    """A line on the terminal of the first rank while it reads; elsewhere nothing."""
    saved = contents.saved_layout()
    doing = f"loading {path.name}"
    if saved is not None and layout is not None and (then := _cut(saved)) != (now := _cut(layout)):
        doing += f", {then} as {now}"
        if show:
            logger.info("%s", doing)
    if not show or not sys.stderr.isatty():
        yield lambda done, size: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(doing)
        yield lambda done, size: line.update(task, completed=done, total=size)


def _cut(layout: ParallelLayout) -> str:
    sizes = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "dp": layout.dp}
    return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"


@contextlib.contextmanager
def _naming(what: str, team: Teamwork) -> Iterator[None]:
    """Errors of other ranks that say what was going on."""
    try:
        yield
    except OthersFailedError as error:
        # The same class here as where it happened, if it is one of ours.
        names = {text.partition(":")[0] for text in error.problems.values()}
        kind = getattr(errors, names.pop()) if names <= set(_SHARED) and len(names) == 1 else None
        said = str(error).rstrip(".")
        raise (kind or CheckpointError)(f"{what} failed: {said}.") from error
    except RendezvousError as error:
        said = f"{what} failed: {error} Every rank has to call it, with the same arguments."
        raise CheckpointError(said) from error
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{what} failed on rank {team.rank}: {error}.") from error
