"""The life of one checkpoint directory, from hidden and unfinished to named by the tracker.

The process that leads the save begins and publishes the directory. That process may be killed at
any instant. Then either the previous checkpoint or the new one is complete,
:func:`~megapg.checkpoint.directory.latest` finds it, and the next :meth:`Partial.begin` removes the
rest.

Each partial directory has its own lock file. The lock is held while the save runs, and so tells a
running save from a dead one. One more lock, on the root, is held during the renames. The locks are
the kernel's (``flock``), so they end with their process. They work between hosts only if the file
system supports that (Lustre: mounted with ``flock``, not ``localflock``). If the mount table says
that they do not, unfinished saves of other hosts are left alone, with a warning. If there are no
locks at all, saves work, and unfinished saves are never removed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from megapg.checkpoint.directory import (
    PENDING,
    RELEASE,
    TRACKER,
    CheckpointInfo,
    committed_pending,
    find,
    hidden_in,
    hidden_name,
    iteration_name,
    list_checkpoints,
    names_in,
    parse_hidden,
    tracker_text,
    what_is_missing,
)
from megapg.checkpoint.files import sync_directory
from megapg.checkpoint.manifest import write_file
from megapg.checkpoint.mounts import local_locks
from megapg.errors import CheckpointError, CheckpointSaveError

logger = logging.getLogger(__name__)

ROOT_LOCK = ".megapg.lock"

_LOCK_SUFFIX = ".lock"
_UNKNOWN = "an unknown process"
_BUSY = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK)


class Partial:
    """A checkpoint directory that is being written. Made by :meth:`begin`.

    It ends with :meth:`publish` or :meth:`discard`. The next save removes a directory whose process
    has ended. Several may exist under one root, in one process or in many.

    Attributes:
        path: the directory to write into, ``<root>/.iter_0000123.partial-<token>``.
    """

    def __init__(self, root: Path, name: str, token: str, timeout: float) -> None:
        self.path = root / hidden_name(name, "partial", token)
        self._pending = root / f"{PENDING}{token}"
        self._root, self._name, self._token, self._timeout = root, name, token, timeout
        self._lock: _Lock | None = None

    @classmethod
    def begin(
        cls,
        root: str | os.PathLike[str],
        *,
        iteration: int = 0,
        release: bool = False,
        timeout: float = 60.0,
    ) -> Self:
        """Make the directory, and remove the files of dead saves under ``root``.

        A ``release`` has no iteration. ``timeout`` limits the wait, here and in :meth:`publish`,
        for the lock of another job that saves under ``root``. It is in seconds.

        Raises:
            CheckpointSaveError: ``root`` can't be made or written, or stays locked.
            CheckpointError: ``iteration`` is negative.
        """
        name = RELEASE if release else iteration_name(iteration)
        partial = cls(Path(root).absolute(), name, secrets.token_hex(4), timeout)
        with _explained("make", partial._root):
            _make_durable(partial._root)
        if why := local_locks(partial._root):
            logger.warning(
                "%s: file locks are not seen by other hosts there (%s); save from one job at a "
                "time, and remove by hand what unfinished saves of other hosts have left",
                partial._root,
                why,
            )
        with _explained("begin a checkpoint in", partial._root):
            with _root_locked(partial._root, timeout):
                _settle(partial._root)
                partial._make()
            _sweep(partial._root)
        return partial

    def publish(
        self, keep: int | None = None, *, retain_every: int | None = None
    ) -> CheckpointInfo:
        """Give the directory its final name and write it into the tracker.

        Every file in it must have been synced to disk. An older save of the same iteration is
        replaced. If an error occurs before the final rename, nothing has changed: free space, for
        example, and call this again.

        Args:
            keep: how many complete iterations to keep: this one and the newest others. None keeps
                all. The newest one, the one that the tracker names, releases, symbolic links and
                incomplete directories are never removed.
            retain_every: iterations that are a multiple of it are never removed, and not counted.

        Raises:
            CheckpointSaveError: files are missing, the disk is full, or the root stays locked.
        """
        if (lock := self._lock) is None:
            raise CheckpointSaveError(f"{self.path} was published or discarded already.")
        check_keep(keep, retain_every)
        if problem := what_is_missing(self.path):
            raise CheckpointSaveError(f"{self.path} {problem}, so it is not published.")
        with _explained("publish a checkpoint in", self._root):
            sync_directory(self.path)
            with _root_locked(self._root, self._timeout):
                _settle(self._root)
                try:
                    self._commit()
                finally:
                    if not self.path.exists():  # published, even if a later step failed
                        self._end(lock)
                # Still under the root lock: another job may remove this checkpoint as soon as it is
                # free.
                info = find(self._root, self._name)
                _put_away_replaced(self._root)
                if keep is not None:
                    _retire(self._root, self._name, keep, retain_every)
            _sweep(self._root)
        if info is None or not info.complete:
            raise CheckpointSaveError(
                f"{self._root / self._name} was published and then changed or removed by others."
            )
        return info

    def discard(self) -> None:
        """Remove the directory and its contents. Does nothing after :meth:`publish` or twice.

        An error is logged, and the next save removes the rest.
        """
        if self._lock is None:
            return
        with _logged("remove", self.path):
            self._pending.unlink(missing_ok=True)
            _put_away(self._root, self._name, self.path)
        self._end(self._lock)
        _sweep(self._root)

    def _make(self) -> None:
        # The lock comes first: a directory without a lock counts as dead.
        lock_file = _lock_of(self.path)
        lock = _Lock(lock_file)
        try:
            lock.take(or_without=True)
            lock.sign()
            self.path.mkdir()
        except BaseException:
            lock_file.unlink(missing_ok=True)
            lock.free()
            raise
        self._lock = lock

    def _end(self, lock: _Lock) -> None:
        with _logged("remove", _lock_of(self.path)):
            _lock_of(self.path).unlink(missing_ok=True)
        lock.free()
        self._lock = None

    def _commit(self) -> None:
        final, pending = self._root / self._name, self._pending
        older = self._root / hidden_name(self._name, "replaced", self._token)
        try:
            # Everything that needs disk space happens before anything is visible.
            write_file(pending, tracker_text(self._name).encode())
            sync_directory(self._root)
            if os.path.lexists(final):
                os.rename(final, older)
            os.rename(self.path, final)
        except BaseException:
            if self.path.exists():
                with _logged("undo the publishing of", self.path):
                    if os.path.lexists(older) and not os.path.lexists(final):
                        os.rename(older, final)
                    pending.unlink(missing_ok=True)
            raise
        try:
            sync_directory(self._root)
            os.replace(pending, self._root / TRACKER)
            sync_directory(self._root)
        except OSError as error:
            raise CheckpointSaveError(
                f"{final} is complete, but {TRACKER} could not be made to name it: "
                f"{error.strerror}. The next save does it, or write "
                f"{tracker_text(self._name)!r} into it."
            ) from error


class _Lock:
    """A lock on a file, held until :meth:`free` or until this process ends."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self._file = open(path, "ab+" if create else "rb+", buffering=0)  # noqa: SIM115

    def take(self, *, or_without: bool) -> bool:
        """Try to take the lock without waiting. Return ``or_without`` if there is no locking."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%s: no file locks here (%s); do not save from two jobs at once, and remove "
                "unfinished saves by hand",
                self._file.name,
                error.strerror,
            )
            return or_without
        return True

    def sign(self) -> None:
        """Write the holder into the file, for the error message of a process that waits."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):  # on a full disk the lock works without it
            self._file.truncate(0)
            self._file.write(f"{socket.gethostname()}, pid {os.getpid()}, since {since}".encode())

    def holder(self) -> str:
        """Return a description of the process that holds the lock."""
        self._file.seek(0)
        return (self._file.read(200) or b"").decode(errors="replace") or _UNKNOWN

    def holder_is_elsewhere(self) -> bool:
        """True if another host signed it last."""
        return self.holder().partition(",")[0] not in (_UNKNOWN, socket.gethostname())

    def free(self) -> None:
        """Release the lock, also in forked children that inherited the file handle."""
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


@contextmanager
def _root_locked(root: Path, timeout: float) -> Iterator[None]:
    # Never removed: two processes could then lock two different files of this name.
    lock = _Lock(root / ROOT_LOCK)
    try:
        deadline, pause = time.monotonic() + timeout, 0.005
        while not lock.take(or_without=True):
            if time.monotonic() > deadline:
                raise CheckpointSaveError(
                    f"{root} is locked by another save ({lock.holder()}) and stayed so for "
                    f"{timeout:g} s. If that process hangs, end it and save again; its lock goes "
                    "with it."
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.25)
        lock.sign()
        yield
    finally:
        lock.free()


def _settle(root: Path) -> None:
    """Finish or undo the renames of dead saves. The caller holds the root lock."""
    for path, parts in hidden_in(root, "partial"):
        with _logged("remove", path):
            if _is_dead(path):
                logger.info("removing %s, which a save that died has left", path)
                # The pending tracker first: without its partial directory it would count as
                # committed.
                (root / f"{PENDING}{parts.token}").unlink(missing_ok=True)
                _put_away(root, parts.name, path)
                _lock_of(path).unlink(missing_ok=True)
    for entry in names_in(root):
        if entry.endswith(_LOCK_SUFFIX) and parse_hidden(entry.removesuffix(_LOCK_SUFFIX)):
            partial = root / entry.removesuffix(_LOCK_SUFFIX)
            with _logged("remove", root / entry):
                if not partial.exists() and _is_dead(partial):
                    (root / entry).unlink(missing_ok=True)
    for path, parts in hidden_in(root, "replaced"):
        if not os.path.lexists(root / parts.name):
            older = find(root, parts.name)
            with _logged("restore", path):
                os.rename(older.path if older else path, root / parts.name)
    _put_away_replaced(root)
    if pending := committed_pending(root):
        with _logged("write", root / TRACKER):
            os.replace(pending, root / TRACKER)
    for entry in names_in(root):
        if entry.startswith(PENDING):  # no commit is running, so it is void
            with _logged("remove", root / entry):
                (root / entry).unlink(missing_ok=True)
    sync_directory(root)


def _is_dead(partial: Path) -> bool:
    try:
        lock = _Lock(_lock_of(partial), create=False)
    except FileNotFoundError:
        return True
    try:
        if lock.holder_is_elsewhere() and local_locks(partial.parent):
            return False  # unknown, so treated as alive
        return lock.take(or_without=False)
    finally:
        lock.free()


def _put_away_replaced(root: Path) -> None:
    for path, parts in hidden_in(root, "replaced"):
        if os.path.lexists(root / parts.name):
            with _logged("remove", path):
                _put_away(root, parts.name, path)


def _retire(root: Path, name: str, keep: int, retain_every: int | None) -> None:
    """Put away all but the newest iterations.

    The caller holds the root lock, and the tracker names ``name``.
    """
    complete = [
        info
        for info in list_checkpoints(root)
        if info.complete and not info.release and info.path.name == iteration_name(info.iteration)
    ]
    others = [
        info
        for info in complete
        if info.path.name != name and not (retain_every and info.iteration % retain_every == 0)
    ]
    spare = keep if name == RELEASE else keep - 1
    newest = complete[-1].path.name if complete else name
    for info in others[: max(len(others) - spare, 0)]:
        if info.path.name != newest and not info.path.is_symlink():
            with _logged("remove", info.path):
                _put_away(root, info.path.name, info.path)


def _put_away(root: Path, name: str, path: Path) -> None:
    """Rename a directory to a hidden name, so that a half-deleted one never looks like a
    checkpoint.
    """
    with suppress(FileNotFoundError):
        os.rename(path, root / hidden_name(name, "removed", secrets.token_hex(4)))


def _sweep(root: Path) -> None:
    """Delete all directories that were put away. Needs no lock; the next save tries again."""
    for path, _ in hidden_in(root, "removed"):
        with _logged("delete", path):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            for _ in range(10):
                if not path.exists():
                    break
                with suppress(FileNotFoundError):  # another process deletes it too
                    shutil.rmtree(path)


def check_keep(keep: int | None, retain_every: int | None = None) -> None:
    """Refuse values of ``keep`` and ``retain_every`` that make no sense.

    Raises:
        CheckpointSaveError: a value makes no sense.
    """
    if keep is not None and keep < 1:
        raise CheckpointSaveError(
            f"keep={keep}: give how many checkpoints to keep, 1 or more (the newest is always "
            "kept), or None for all."
        )
    if retain_every is None:
        return
    if type(retain_every) is not int or retain_every < 1:
        raise CheckpointSaveError(
            f"retain_every={retain_every!r}: give the steps between checkpoints to keep for good, "
            "1 or more."
        )
    if keep is None:
        raise CheckpointSaveError(
            f"retain_every={retain_every} says what keep= does not remove, and keep=None removes "
            "nothing. Give keep= as well."
        )


def _lock_of(partial: Path) -> Path:
    return partial.with_name(partial.name + _LOCK_SUFFIX)


def _make_durable(directory: Path) -> None:
    missing = [p for p in (directory, *directory.parents) if not p.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent)


@contextmanager
def _explained(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointSaveError:
        raise
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, _ADVICE[0])
        raise CheckpointSaveError(f"can't {what} {path}: {error.strerror}. {advice}") from error
    except CheckpointError as error:
        raise CheckpointSaveError(str(error)) from error


_ADVICE = dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT),
    "Free some space, or save elsewhere; no checkpoint that was there is harmed.",
)
_ADVICE |= dict.fromkeys(
    (errno.EACCES, errno.EPERM), "Give this user the right to write there, or save elsewhere."
)
_ADVICE |= dict.fromkeys(
    (errno.ENOTDIR, errno.EEXIST), "There is a file where a directory must be: give another name."
)
_ADVICE[errno.EROFS] = "Mount it for writing, or save elsewhere."
_ADVICE[0] = "Save elsewhere if that persists; no checkpoint that was there is harmed."


@contextmanager
def _logged(what: str, path: Path) -> Iterator[None]:
    """Log an OSError of clean-up, which must not fail a save."""
    try:
        yield
    except OSError as error:
        logger.warning("could not %s %s (%s); the next save tries again", what, path, error)
