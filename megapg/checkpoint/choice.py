"""The choice of the checkpoint to load: an iteration, or the latest, which may change meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from typing_extensions import override

from megapg.checkpoint.directory import (
    INDEX_FILE,
    RELEASE,
    CheckpointInfo,
    find,
    iteration_name,
    latest_and_why,
    list_checkpoints,
)
from megapg.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError

OF_THE_CHECKPOINT = {
    "BrokenCheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "UnsafeCheckpointError",
}
"""Names of errors whose cause is the checkpoint itself."""

# A limit, because another job may save faster than this one loads.
_ATTEMPTS = 5


class Choice:
    """The choice of one checkpoint under a directory.

    Args:
        root: where the checkpoints are, or the directory of one.
        iteration: the iteration; None for the latest.

    Attributes:
        fallback: why the chosen checkpoint is not the one that the tracker names; empty if it is.
    """

    def __init__(self, root: Path, iteration: int | None) -> None:
        self._root, self._iteration = root, iteration
        self._made: tuple[Path, tuple[int, int] | None] | None = None
        self._attempts = 0
        self.fallback = ""

    @override
    def __str__(self) -> str:
        which = "the latest" if self._iteration is None else f"iteration {self._iteration}"
        return f"{which} from {self._root}"

    def make(self) -> CheckpointInfo:
        """Find the checkpoint.

        Raises:
            CheckpointNotFoundError: there is none.
            BrokenCheckpointError: there are only incomplete ones.
        """
        self._attempts += 1
        found = self._find()
        self._made = found.path, identity(found.path)
        return found

    def is_worth_another(self, troubles: Mapping[int, str]) -> bool:
        """True if all ranks should try again, because the chosen checkpoint was removed or
        replaced.

        False if an iteration was asked for, or if a rank failed for another reason.
        """
        if self._iteration is not None or self._attempts >= _ATTEMPTS:
            return False
        if not are_of_the_checkpoint(troubles.values()):
            return False
        try:
            if self._is_one():
                return False
            found, _ = latest_and_why(self._root)
        except (CheckpointError, OSError):  # the first error is the one to report
            return False
        return found is not None and (found.path, identity(found.path)) != self._made

    def _is_one(self) -> bool:
        return (self._root / INDEX_FILE).exists()

    def _find(self) -> CheckpointInfo:
        root, iteration = self._root, self._iteration
        if self._is_one():  # root is itself a checkpoint
            if iteration is not None and root.name != iteration_name(iteration):
                raise CheckpointNotFoundError(
                    f"{root} is a checkpoint itself, and not that of step {iteration}. Leave "
                    "iteration out, or give the directory above."
                )
            return CheckpointInfo(
                path=root, iteration=0, release=root.name == RELEASE, complete=True
            )
        if iteration is None:
            found, self.fallback = latest_and_why(root)
        else:
            found = find(root, iteration_name(iteration))
        if found is None or not found.complete:
            if not root.is_dir():
                raise CheckpointNotFoundError(f"there is no directory {root}.")
            named = [c for c in list_checkpoints(root) if not c.path.name.startswith(".")]
            bad = [c for c in named if not c.complete and iteration in (None, c.iteration)]
            if bad and not (iteration is None and any(c.complete for c in named)):
                problems = [f"{c.path.name} {c.problem}" for c in bad]
                raise BrokenCheckpointError(
                    f"{root}: {'; '.join(problems[-4:])}. Take it from a copy, or load another "
                    "with iteration=.",
                    problems,
                )
            have = ", ".join(c.path.name for c in list_checkpoints(root) if c.complete)
            which = (
                "complete checkpoint" if iteration is None else f"checkpoint of step {iteration}"
            )
            rest = f" It has {have}." if have else ""
            raise CheckpointNotFoundError(f"{root} has no {which}.{rest}")
        return found


def are_of_the_checkpoint(troubles: Iterable[str]) -> bool:
    """True if every error was caused by the checkpoint: no rank died or has a bug."""
    return all(text.partition(":")[0] in OF_THE_CHECKPOINT for text in troubles)


def identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a directory, which change if it is replaced; None if there is
    none.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


class Changes:
    """Adds to an error of a load that the model had begun to change.

    Attributes:
        begun: True once the first tensor is about to be read.
    """

    def __init__(self) -> None:
        self.begun = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.begun:
            error.add_note(
                "The load had begun: weights, and perhaps the optimizer and the random streams, "
                "are those of the checkpoint in part. Load again, or build them anew."
            )
