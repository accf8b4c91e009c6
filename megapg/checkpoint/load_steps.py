"""The steps of a load, in order: :class:`Load`."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import scheduler as schedulers
from megapg.checkpoint.can_reshard import check_reshard
from megapg.checkpoint.choice import (
    Choice,
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
    load_model,
    model_state,
    scheduler_state,
    showing,
    vocabularies_of,
)
from megapg.checkpoint.team import exchanging, layout_of
from megapg.checkpoint.verify import verify as verify_files
from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointMismatchError,
)
from megapg.layout import ParallelLayout
from megapg.rendezvous.joint_work import JointWork
from megapg.rng import RngState, restore_rng_state

logger = logging.getLogger(__name__)

_RANK_EXTRA = f"{RANK_EXTRA}/shard_"
_PLACING = ("tp", "cp", "pp", "order")  # the rank's place in the data and in the pipeline
_RERUN = "rerun_state_machine_state"  # for Megatron's own use


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of :func:`megapg.load_checkpoint`."""

    model: Sequence[torch.nn.Module] | torch.nn.Module
    optimizer: MegatronOptimizer | None
    scheduler: Stateful | None
    pg: ProcessGroupCollection
    shown: ProcessGroupCollection | None  # published to the model; None if no groups were passed
    strict: bool
    verify: bool | None
    weights_only: bool
    load_optimizer: bool
    load_scheduler: bool
    rng: bool
    rng_key: str

    def settings(self, choice: Choice) -> dict[str, str]:
        """Return the arguments that must be equal on all ranks."""
        settings = {
            "checkpoint": choice,
            "strict": self.strict,
            "optimizer": "none" if self.optimizer is None else "given",
            "weights_only": self.weights_only,
            "load_optimizer": self.load_optimizer,
            "load_scheduler": self.load_scheduler,
        }
        return {name: str(value) for name, value in settings.items()}


class Load:
    """One attempt to load, as the steps of a protocol, most of which end where all ranks meet.

    Brackets have the topics of the meetings.

    1. Before this object: the ranks compare their arguments.
    2. :meth:`choose`: the leader names the checkpoint, and all read its contents (``directory``).
    3. :meth:`check`: the saved state fits optimizer, model and scheduler (``model``).
    4. :meth:`ask_the_optimizer`: the optimizer names its state, perhaps with collectives.
    5. :meth:`fit`: keys and shapes fit on every rank, and the leader lists the saved keys that no
       rank reads (``fits``, ``unexpected``).
    6. :meth:`read`: tensors are read, and the weights change (``read``).
    7. :meth:`apply`: optimizer, scheduler and random streams take their state (``loaded``).

    An error before step 6 leaves all as it was.
    """

    def __init__(self, asked: Asked, team: JointWork) -> None:
        self._asked, self._team = asked, team
        check_key(asked.rng_key)
        self._chunks = chunks_of(asked.model)
        check_groups(self._chunks, asked.pg)

    def choose(self, choice: Choice) -> None:
        """Have the leader choose the checkpoint, and read its contents, without tensors."""
        asked, team = self._asked, self._team
        if team.leading:
            found = choice.make()
            if asked.verify:
                _verify(found.path, team)
            chosen = {"path": str(found.path), "fallback": choice.fallback}
            team.announce("directory", json.dumps(chosen).encode())
        else:
            chosen = json.loads(team.announce("directory"))
        self.path, self.fallback = Path(chosen["path"]), str(chosen["fallback"])
        self._identity = identity(self.path)
        self.contents = read_contents(self.path, check=asked.verify is not False)
        self.release = self.path.name == RELEASE
        self._whole = not (asked.weights_only or self.release)

    def check(self) -> None:
        """Check that the saved state fits optimizer, model and scheduler."""
        asked, contents = self._asked, self.contents
        self._layout = layout_of(asked.pg)
        self._restored = asked.optimizer if asked.load_optimizer and self._whole else None
        self._live = optimizers.with_groups(contents.content_metadata, asked.pg)
        if self._restored is not None:
            _check_optimizer(contents, self._layout, self._chunks)
            optimizers.check(self._restored, self._live)
        self._state: State = dict(model_state(self._chunks, self._live, asked.shown))
        self.common = copy.deepcopy(dict(contents.common))
        if self._restored is not None:
            saved = self.common.get("optimizer", {})
            self.common["optimizer"] = fit(self._restored, saved)  # type: ignore[arg-type]
        self._schedule = None
        if asked.scheduler is not None and asked.load_scheduler and self._whole:
            self._schedule = scheduler_state(contents.common)
            schedulers.check(asked.scheduler, self._schedule)
        # Wait for all ranks: a rank that fails near a collective leaves the others in it.
        self._team.agree("model")

    def ask_the_optimizer(self) -> None:
        """Add the optimizer's part to the state. The optimizer may run collectives."""
        if self._restored is not None:
            with exchanging("the optimizer's state", self._team), showing(self._asked.shown):
                self._state["optimizer"] = optimizers.wanted_state(
                    self._restored, self._state, metadata=self._live
                )

    def fit(self) -> None:
        """Check keys and shapes, read what belongs to this rank alone, and agree on the rest."""
        asked, contents, team = self._asked, self.contents, self._team
        self.loading = Loading(
            self._state,
            contents,
            strict=asked.strict,
            vocabularies=vocabularies_of(self._chunks),
        )
        self._record, self.rng_report = None, None
        if asked.rng and self._whole:
            self._record, self.rng_report = _random_streams(contents, asked.pg, asked.rng_key)
        if self.loading.resized and team.leading:
            logger.warning(
                "%s: other sizes were saved of %s; what is new is zero, what is beyond the "
                "end is left out",
                self.path,
                ", ".join(f"{key} {shape}" for key, shape in self.loading.resized.items()),
            )
        self.rank_extra, self.rank_extra_lost = _rank_extra(contents, self._layout, team)
        self.unexpected = _unexpected(contents, self.loading, self._restored is not None, team)

    def read(self) -> None:
        """Read the tensors into model and state."""
        with _progress(self.path, self.contents, self._layout, self._team) as progress:
            self._state = self.loading.read(self.common, progress)
        if identity(self.path) not in (self._identity, None):
            raise BrokenCheckpointError(f"{self.path} was replaced while it was read. Load again.")
        load_model(
            self._chunks, self._state, strict=self._asked.strict and not self.loading.missing
        )
        self._team.agree("read")

    def apply(self) -> None:
        """Give optimizer, scheduler and random streams what was read."""
        asked, team = self._asked, self._team
        with exchanging("the optimizer's state", team):
            if self._restored is not None:
                restore(self._restored, self._state["optimizer"])  # type: ignore[arg-type]
            else:
                reload_weights(asked.optimizer)
        if asked.scheduler is not None and self._schedule is not None:
            # Last, as in Megatron: it may be configured to ignore the saved learning rates.
            schedulers.restore(asked.scheduler, self._schedule)
        if self._record is not None:
            restore_rng_state([self._record], asked.pg)
        team.agree("loaded")


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
        stacklevel=5,  # the caller of load_checkpoint
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
