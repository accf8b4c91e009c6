"""The checkpoints under a directory, found from names and small files only.

:mod:`megapg.checkpoint.commit` adds and removes them.

Megatron's ``training/checkpointing.py`` reads and writes the plain names (``iter_0000123``,
``release``, the tracker). The hidden names are megapg's, and Megatron ignores them:

- ``.iter_0000123.partial-<token>``: a save that is running, or that died.
- ``.iter_0000123.replaced-<token>``: an older save of the same iteration. If the final name is
  missing, a save died between two renames, and this is the checkpoint of that iteration.
- ``.iter_0000123.removed-<token>``: waits for its deletion.
- ``.latest_checkpointed_iteration.txt.pending-<token>``: the next tracker. If the partial directory
  with that token no longer exists, it got its final name, and the pending tracker counts.

This module writes nothing, takes no lock, and reads only the small files it needs.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple, cast

from megapg.checkpoint.files import read_json, read_small
from megapg.checkpoint.manifest import SAVED_AT, read_manifest
from megapg.errors import BrokenCheckpointError, CheckpointError

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
PENDING = f".{TRACKER}.pending-"
RELEASE = "release"
FORMAT_FILE = "metadata.json"
FORMAT = "torch_dist"
INDEX_FILE = ".metadata"
COMMON_FILE = "common.pt"

Kind = Literal["partial", "replaced", "removed"]

_HIDDEN = re.compile(
    r"\.(?P<name>iter_\d{7,}|release)\.(?P<kind>partial|replaced|removed)-(?P<token>[0-9a-f]+)"
)
# Bytes.
_LARGEST_TRACKER = 64
_LARGEST_FORMAT_FILE = 2**20


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint on disk.

    Attributes:
        path: its directory.
        iteration: number of training steps done; 0 for a release.
        release: it is the directory ``release``.
        complete: every file of a finished save is there. Checksums are not checked, as that reads
            every byte.
        problem: what is missing, as in "has no metadata.json"; empty if complete.
    """

    path: Path
    iteration: int
    release: bool
    complete: bool
    problem: str = ""

    @property
    def saved_at(self) -> datetime | None:
        """When the save ended: the time in the manifest, which a copy keeps.

        Without this time, that of the file ``metadata.json``; None if there is no such file.
        """
        noted = None
        with suppress(CheckpointError):
            manifest = read_manifest(self.path)
            noted = manifest.about.get(SAVED_AT) if manifest else None
        written = _written(self.path / FORMAT_FILE)
        if isinstance(noted, int | float):
            with suppress(ValueError, OSError, OverflowError):  # edited
                return datetime.fromtimestamp(noted, UTC)
        return None if written is None else datetime.fromtimestamp(written / 1e9, UTC)

    @property
    def size(self) -> int:
        """Bytes in its files, counted at every call. An unfinished save counts as far as it is
        written.
        """
        total = 0
        for file in self.path.rglob("*"):
            with suppress(FileNotFoundError):  # a save may end meanwhile and rename the directory
                total += file.stat().st_size if file.is_file() else 0
        return total


class Hidden(NamedTuple):
    """The parts of a hidden directory name of megapg: see :func:`hidden_name`."""

    name: str
    kind: Kind
    token: str


def iteration_name(iteration: int) -> str:
    """Return the directory name of an iteration, as in ``iter_0000123``.

    Raises:
        CheckpointError: ``iteration`` is negative.
    """
    if iteration < 0:
        raise CheckpointError(f"iteration {iteration}: give the number of steps done, 0 or more.")
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the iteration in a directory name, 0 for ``release``; None for other names."""
    if name == RELEASE:
        return 0
    digits = name.removeprefix("iter_")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    iteration = int(digits)
    return iteration if iteration_name(iteration) == name else None


def tracker_text(name: str) -> str:
    """Return the text of a tracker that names this directory."""
    return RELEASE if name == RELEASE else str(iteration_of(name))


def hidden_name(name: str, kind: Kind, token: str) -> str:
    """Return the name of a hidden sibling of the directory ``name``; ``token`` makes it unique."""
    return f".{name}.{kind}-{token}"


def parse_hidden(entry: str) -> Hidden | None:
    """Return the parts of a name made by :func:`hidden_name`, or None."""
    match = _HIDDEN.fullmatch(entry)
    if match is None or iteration_of(match["name"]) is None:
        return None
    return Hidden(match["name"], cast(Kind, match["kind"]), match["token"])


def hidden_in(root: Path, kind: Kind) -> list[tuple[Path, Hidden]]:
    """Return the hidden directories of one kind, each with the parts of its name."""
    found = [(root / entry, parse_hidden(entry)) for entry in names_in(root)]
    return [(path, parts) for path, parts in found if parts and parts.kind == kind]


def list_checkpoints(directory: str | os.PathLike[str]) -> tuple[CheckpointInfo, ...]:
    """List every checkpoint under ``directory``, the release first, then by ascending iteration.

    Incomplete ones are included, with the problem: unfinished saves of megapg under their hidden
    names, and directories of Megatron. Empty if there is no such directory.

    Raises:
        CheckpointError: ``directory`` is a file or can't be read.
    """
    root = Path(directory)
    names: set[str] = set()
    found: list[CheckpointInfo] = []
    for entry in names_in(root):
        hidden = parse_hidden(entry)
        if iteration_of(entry) is not None:
            names.add(entry)
        elif hidden and hidden.kind == "replaced":
            names.add(hidden.name)
        elif hidden and hidden.kind == "partial":
            found.append(_info(root / entry, hidden.name, "is an unfinished save"))
    found += [info for info in (find(root, name) for name in names) if info]
    return tuple(sorted(found, key=lambda i: (not i.release, i.iteration, i.complete, i.path.name)))


def latest(directory: str | os.PathLike[str]) -> CheckpointInfo | None:
    """Return the checkpoint that a job should resume from, or None if there is no complete one.

    This is the checkpoint that the tracker names, even if newer ones exist: to roll back, write an
    older iteration into the tracker. If the tracker is damaged, or names a missing or incomplete
    checkpoint, the newest complete one is returned, with a warning.

    Raises:
        CheckpointError: ``directory`` is a file or can't be read.
    """
    return latest_and_why(directory)[0]


def latest_and_why(directory: str | os.PathLike[str]) -> tuple[CheckpointInfo | None, str]:
    """As :func:`latest`, with the problem of the tracker if another checkpoint was taken."""
    root = Path(directory)
    wrong = f"there is no {TRACKER}"
    try:
        name = _current(root)
    except BrokenCheckpointError as error:
        wrong = error.problems[0]
    else:
        info = find(root, name) if name else None
        if info and info.complete:
            return info, ""
        if name:
            wrong = f"{TRACKER} names {name}, which {info.problem if info else 'is not there'}"
    complete = [info for info in list_checkpoints(root) if info.complete]
    if complete:
        path = complete[-1].path
        logger.warning("%s: %s; taking the newest complete checkpoint, %s", root, wrong, path)
        return complete[-1], wrong
    if not wrong.startswith("there is no"):
        logger.warning("%s: %s, and there is no complete checkpoint", root, wrong)
    return None, wrong


def find(directory: str | os.PathLike[str], name: str) -> CheckpointInfo | None:
    """Return the checkpoint called ``name`` (``iter_0000123`` or ``release``), complete or not.

    None if there is none. Replacing an older save of the same iteration takes two renames. If a
    save died, or is now, between the two, the path is a hidden one.
    """
    root = Path(directory)
    if iteration_of(name) is None:
        return None
    best: CheckpointInfo | None = None
    # The final name again at the end: by then the save that was between its renames is done.
    for look in (_final, _replaced, _final):
        for path in look(root, name):
            info = _info(path, name, what_is_missing(path))
            if info.complete:
                return info
            # Ignore a directory that another process moved meanwhile.
            if best is None and path.is_dir():
                best = info
    return best


def read_tracker(directory: str | os.PathLike[str]) -> str | None:
    """Return the directory name that the tracker stands for; None if there is no tracker.

    Raises:
        BrokenCheckpointError: it holds neither a number nor ``release``, or can't be read.
    """
    return _named_by(Path(directory) / TRACKER)


def committed_pending(directory: str | os.PathLike[str]) -> Path | None:
    """Return the pending tracker that counts instead of the tracker, or None.

    It belongs to a save that died after its directory got its final name. A tracker that was
    written later takes precedence.
    """
    root = Path(directory)
    newest: tuple[int, Path] | None = None
    for entry in names_in(root):
        if not entry.startswith(PENDING):
            continue
        pending = root / entry
        try:
            name = _named_by(pending)
        except BrokenCheckpointError:
            continue
        if name is None or not _final(root, name):
            continue
        if (root / hidden_name(name, "partial", entry.removeprefix(PENDING))).exists():
            continue
        # Look at the time last. Clean-up removes a pending tracker before its partial directory. So
        # a pending tracker that still exists without that directory belongs to a renamed directory.
        written = _written(pending)
        if written is not None and (newest is None or written > newest[0]):
            newest = written, pending
    if newest is None or newest[0] < (_written(root / TRACKER) or 0):
        return None
    return newest[1]


def what_is_missing(path: Path) -> str:
    """Return why this directory is no complete checkpoint, as in "has no .metadata"; empty if it
    is.
    """
    try:
        file = path / FORMAT_FILE
        if not file.exists():
            if any(path.glob("mp_rank_*")):
                return "is in an older format (mp_rank_*), which megapg does not read"
            return f"has no {FORMAT_FILE}"
        if not file.stat().st_size:
            return f"has an empty {FORMAT_FILE}"
        form = read_json(file, _LARGEST_FORMAT_FILE)
        if not isinstance(form, dict) or "sharded_backend" not in form:
            return f"has a {FORMAT_FILE} that names no sharded_backend"
        needed = [INDEX_FILE, COMMON_FILE] if form.get("common_backend") else [INDEX_FILE]
        for name in needed:
            if not (path / name).exists():
                return f"has no {name}"
            if not (path / name).stat().st_size:
                return f"has an empty {name}"
        manifest = read_manifest(path)
        for name, known in manifest.files.items() if manifest else ():
            if not (path / name).exists():
                return f"has no {name}"
            size = (path / name).stat().st_size
            if known.size not in (None, size):
                return f"has a {name} of {size} bytes, {known.size} were saved"
    except BrokenCheckpointError as error:
        name, _, problem = error.problems[0].partition(": ")
        return f"has a {name} that {problem}"
    except OSError as error:
        return f"can't be read: {error.strerror}"
    return ""


def names_in(root: Path) -> list[str]:
    """Return the names in a directory; empty if there is none.

    Raises:
        CheckpointError: it is a file or can't be read.
    """
    try:
        return os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"can't look for checkpoints in {root}: {error.strerror}. Give a directory that this "
            "user may read."
        ) from error


def _info(path: Path, name: str, problem: str) -> CheckpointInfo:
    return CheckpointInfo(
        path=path,
        iteration=iteration_of(name) or 0,
        release=name == RELEASE,
        complete=not problem,
        problem=problem,
    )


def _final(root: Path, name: str) -> list[Path]:
    return [root / name] if (root / name).is_dir() else []


def _replaced(root: Path, name: str) -> list[Path]:
    paths = [path for path, parts in hidden_in(root, "replaced") if parts.name == name]
    return sorted(paths, key=lambda path: _written(path / FORMAT_FILE) or 0, reverse=True)


def _current(root: Path) -> str | None:
    # Before the tracker: a pending tracker that vanishes now has just become the tracker.
    if pending := committed_pending(root):
        name = _named_by(pending)
        if name is not None:
            return name
    return read_tracker(root)


def _named_by(tracker: Path) -> str | None:
    if not os.path.lexists(tracker):
        return None
    try:
        text = read_small(tracker, _LARGEST_TRACKER).decode("ascii", "replace").strip()
    except BrokenCheckpointError:
        if not os.path.lexists(tracker):  # it was replaced or removed meanwhile
            return None
        raise
    if text == RELEASE:
        return RELEASE
    if text.isascii() and text.isdecimal():
        return iteration_name(int(text))
    problem = f"holds {text!r}, neither a number nor {RELEASE!r}" if text else "is empty"
    raise BrokenCheckpointError(
        f"{tracker} {problem}. Write the iteration to resume from into it.",
        [f"{TRACKER} {problem}"],
    )


def _written(file: Path) -> int | None:
    """Return the modification time in nanoseconds; None if the file is missing."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None
