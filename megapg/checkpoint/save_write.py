"""The second half of a save: every rank writes, and the leader completes and publishes."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pickle
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.planner import WriteItem

from megapg import __version__
from megapg.checkpoint import rng_entries
from megapg.checkpoint.background import CheckpointSave
from megapg.checkpoint.commit import Partial
from megapg.checkpoint.directory import (
    COMMON_FILE,
    FORMAT_FILE,
    INDEX_FILE,
    CheckpointInfo,
    iteration_name,
)
from megapg.checkpoint.manifest import PARTIAL, FileSum, write_file, write_manifest
from megapg.checkpoint.param_groups import merged
from megapg.checkpoint.planning import Item, merge_plans, partial_keys
from megapg.checkpoint.safe_torch import load_safely
from megapg.checkpoint.team import sizes_of
from megapg.checkpoint.writer import Memory, write_items
from megapg.errors import CheckpointSaveError, RendezvousError
from megapg.layout import ParallelLayout
from megapg.rendezvous.joint_work import CancelledError, JointWork, OthersFailedError
from megapg.torch_private import StorageInfo

logger = logging.getLogger(__name__)


@dataclass
class _Report:
    """The report of a rank to the leader after it has written."""

    plan: list[WriteItem]
    places: list[StorageInfo]
    sums: dict[str, FileSum]
    streams: rng_entries.Drawn
    expected: Set[str]  # keys of weights
    trained: Mapping[str, int]
    optimizer: bytes


@dataclass
class Write:
    """One rank's part of the writing, as the steps of a protocol. It has no collectives.

    Brackets have the topics of the meetings.

    6. The leader makes a hidden directory, and announces it (``directory``).
    7. Every rank writes and syncs its own files there, and reports them (``written``).
    8. The leader adds the files that exist once: metadata, common state, manifest.
    9. When older saves have ended, it gives the directory its final name and writes the tracker
       (``published``).
    """

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
        with naming(self.what, self.team), self.team.in_one_thread(), ending as undo, self.team:
            partial = self._begin(undo) if self.team.leading else None
            here = self._directory() if partial is None else partial.path
            reports = self._write(here)
            if partial is None:
                published: CheckpointInfo = pickle.loads(self.team.announce("published"))
                return published
            sums = self._complete(partial.path, reports)
            info = self._publish(partial, undo)
            size = sum(each.size or 0 for each in sums.values())
            seconds = time.monotonic() - started
            logger.info("%s: %.1f MiB in %.1f s", self.what, size / 2**20, seconds)
            return info

    def _begin(self, undo: contextlib.ExitStack) -> Partial:
        with self.team.busy():
            partial = Partial.begin(self.root, iteration=self.iteration, release=self.release)
        undo.callback(partial.discard)
        self.team.announce("directory", str(partial.path).encode())
        return partial

    def _directory(self) -> Path:
        return Path(self.team.announce("directory").decode())

    def _write(self, here: Path) -> Mapping[int, bytes]:
        team = self.team
        try:
            _check_shared(here)
            places, sums = write_items(here, team.rank, self.items, team.progress, team.busy)
        except (OSError, CheckpointSaveError):
            team.heed()
            raise
        report = _Report(
            plan=[item for item, _ in self.items],
            places=places,
            sums=sums,
            streams=self.streams,
            expected=self.expected,
            trained=self.trained,
            optimizer=self.optimizer,
        )
        self.items = []
        if self.memory is not None:
            self.unused.append(self.memory)
        return team.collect("written", pickle.dumps(report), final=True)

    def _complete(self, here: Path, reports: Mapping[int, bytes]) -> dict[str, FileSum]:
        sums: dict[str, FileSum] = {}
        told: dict[int, _Report] = {rank: pickle.loads(each) for rank, each in reports.items()}
        for rank, each in told.items():
            sums |= each.sums
            for name, file in each.sums.items():
                _check_arrived(here / name, file.size, rank)
        trained: Counter[str] = Counter()
        for each in told.values():
            trained.update(each.trained)
        metadata = merge_plans(
            {rank: each.plan for rank, each in told.items()},
            {rank: each.places for rank, each in told.items()},
            iteration_name(self.iteration),
            weights=set().union(*(each.expected for each in told.values())),
            trained=trained,
        )
        for name, data in (
            (INDEX_FILE, pickle.dumps(metadata)),
            (COMMON_FILE, self._common(told)),
            (FORMAT_FILE, json.dumps(_FORMAT).encode()),
        ):
            sums[name] = write_file(here / name, data)
        about = {
            "version": __version__,
            "iteration": self.iteration,
            "layout": None if self.layout is None else sizes_of(self.layout),
            rng_entries.ALIKE: rng_entries.drew_alike([each.streams for each in told.values()]),
            PARTIAL: partial_keys(metadata),
        }
        write_manifest(here, sums, about)
        return sums

    def _common(self, told: Mapping[int, _Report]) -> bytes:
        """Return the common state, with what all ranks know of the optimizer's."""
        differing: dict[bytes, int] = {}  # the same on most ranks
        for rank, each in told.items():
            differing.setdefault(each.optimizer, rank)
        if len(differing) < 2:
            return self.common
        common = load_safely(self.common, COMMON_FILE)
        states = {rank: load_safely(known, COMMON_FILE) for known, rank in differing.items()}
        common["optimizer"] = merged(states)  # type: ignore[index, arg-type]
        return serialised(common, "the optimizer's state", COMMON_FILE)

    def _publish(self, partial: Partial, undo: contextlib.ExitStack) -> CheckpointInfo:
        team = self.team
        while self.after is not None and not self.after.join(0.1):
            team.progress()  # an older save must not make itself the latest after this one
        team.heed()
        with team.busy():
            info = partial.publish(self.keep, retain_every=self.retain_every)
        undo.pop_all()
        team.announce("published", pickle.dumps(info))
        return info


# Contents of metadata.json. Megatron-core 0.19 reads the first two, earlier versions all.
_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def serialised(value: object, what: str, name: str) -> bytes:
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
def naming(what: str, team: JointWork) -> Iterator[None]:
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
