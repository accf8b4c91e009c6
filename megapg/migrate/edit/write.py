"""Puts rewritten files on disk: each is replaced as a whole or not at all.

The new bytes go into a hidden file beside the old one and reach the disk before they take its
name, so whenever the process is killed each file is either the old or the new one. What a killed
process leaves behind is named ``.NAME.megapg-RANDOM.new`` or ``.old`` and is no Python file to
anybody.
"""

from __future__ import annotations

import glob
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.migration import Rewritten
from megapg.migrate.python.source import Problem

_AS_MUCH_OF_THE_NAME = 40  # characters: a file system takes 255 bytes


class _Refused(Exception):
    """Why a file is not replaced, to follow its name."""


@dataclass
class _Staged:
    """A file of which the new bytes are on disk, under another name."""

    file: Rewritten
    # The file that is replaced; where ``file.path`` is a link, what it leads to. A new one is not
    # there yet.
    target: Path
    new: Path  # the file beside it
    old: Path | None = None  # another name of the file that is replaced, to have it back


def write_files(files: Sequence[Rewritten]) -> list[Problem]:
    """Replace files by what they were rewritten to, and make the new ones: all of them or none.

    A file stays as it is, with a problem that says why, where it is not ``before`` any more, is
    read-only, has further hard links (which would be parted), or can't be written beside. Mode,
    owner and extended attributes are kept, and links are written through. All are staged before the
    first is replaced, and those that were replaced are put back where one can't be, or where the
    user interrupts. A process that is killed between two replacements leaves some of each, every
    one whole.

    Returns:
        Why nothing was written; empty where all of them were.
    """
    staged: list[_Staged] = []
    problems: list[Problem] = []
    try:
        for file in files:
            try:
                staged.append(_stage(file))
            except (_Refused, OSError) as error:
                problems.append(_problem(file, error))
        if not problems:
            problems = _replace(staged)
    finally:
        for each in staged:
            _remove(each.new)
    return problems


def _replace(staged: Sequence[_Staged]) -> list[Problem]:
    done: list[_Staged] = []
    try:
        for each in staged:
            done.append(each)
            _unchanged(each.file, each.target)
            if len(staged) > 1 and not each.file.is_new:
                each.old = _second_name(each.target)
            os.replace(each.new, each.target)
    except (_Refused, OSError) as error:
        return [_problem(done[-1].file, error), *_put_back(done)]
    except BaseException:
        _put_back(done)
        raise
    for each in staged:
        if each.old is not None:
            _remove(each.old)
    for folder in {each.target.parent for each in staged}:
        settle(folder)
    return []


def _put_back(done: Iterable[_Staged]) -> list[Problem]:
    problems = []
    for each in done:
        if each.file.is_new and not os.path.lexists(each.new):
            _remove(each.target)
        if each.old is None:
            continue
        try:
            if os.path.lexists(each.new):  # it has not taken the name
                _remove(each.old)
            else:
                os.replace(each.old, each.target)
        except OSError as error:
            kept = f"is replaced and can't be put back, {each.old.name} is what it was"
            problems.append(Problem(each.file.file, 0, f"{kept}: {error.strerror or error}"))
    return problems


def _stage(file: Rewritten) -> _Staged:
    if file.is_new:
        return _stage_new(file)
    target = Path(os.path.realpath(file.path, strict=True))
    found = target.stat()
    if not stat.S_ISREG(found.st_mode):
        raise _Refused("is no regular file any more")
    if not found.st_mode & 0o222 or not os.access(target, os.W_OK):  # root may write what it likes
        raise _Refused("is read-only")
    links = found.st_nlink
    if links > 1 and (links := links - _leftovers(target)) > 1:
        raise _Refused(f"has {links} hard links, which would be parted")
    _unchanged(file, target)
    new = _beside(target, ".new")
    try:
        _fill(new, file.after, target, found)
    except BaseException:
        _remove(new)
        raise
    return _Staged(file, target, new)


def _stage_new(file: Rewritten) -> _Staged:
    target = Path(os.path.realpath(file.path.parent, strict=True), file.path.name)
    _unchanged(file, target)
    new = _beside(target, ".new")
    try:
        with new.open("wb") as handle:
            handle.write(file.after)
            handle.flush()
            # As its neighbours may be read: mkstemp() lets nobody else.
            os.fchmod(handle.fileno(), stat.S_IMODE(target.parent.stat().st_mode) & 0o666)
            os.fsync(handle.fileno())
    except BaseException:
        _remove(new)
        raise
    return _Staged(file, target, new)


def _fill(new: Path, data: bytes, target: Path, found: os.stat_result) -> None:
    with new.open("wb") as handle:
        handle.write(data)
        made = os.fstat(handle.fileno())
        if (made.st_uid, made.st_gid) != (found.st_uid, found.st_gid):
            try:
                os.chown(new, found.st_uid, found.st_gid)
            except OSError as error:
                raise _Refused("belongs to somebody else, which could not be kept") from error
        handle.flush()
        shutil.copystat(target, new)
        os.utime(new)  # or Python takes the bytecode of the old file for that of the new one
        os.fsync(handle.fileno())


def _unchanged(file: Rewritten, target: Path) -> None:
    if file.is_new:
        if os.path.lexists(target):
            raise _Refused("was made since the others were looked at")
    elif target.read_bytes() != file.before:
        raise _Refused("was changed since it was looked at")


def _beside(target: Path, suffix: str) -> Path:
    """A new empty file next to another one."""
    try:
        handle, name = tempfile.mkstemp(suffix, _prefix(target), target.parent)
    except OSError as error:
        raise _Refused(f"can't be written beside: {error.strerror or error}") from error
    os.close(handle)
    return Path(name)


def _prefix(target: Path) -> str:
    return f".{target.name[:_AS_MUCH_OF_THE_NAME]}.megapg-"


def _second_name(target: Path) -> Path:
    """The file under another name; a copy where there are no hard links."""
    other = _beside(target, ".old")
    try:
        other.unlink()
        try:
            os.link(target, other)
        except OSError:
            shutil.copy2(target, other)
    except BaseException:
        _remove(other)
        raise
    return other


def _leftovers(target: Path) -> int:
    """Remove the names that a killed process gave to a file that it did not get to replace."""
    removed = 0
    for other in target.parent.glob(f"{glob.escape(_prefix(target))}*.old"):
        if other.samefile(target):
            other.unlink()
            removed += 1
    return removed


def settle(folder: Path) -> None:
    """Have the names in a directory on disk, where there is such a thing."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(file: Path) -> None:
    with suppress(OSError):
        file.unlink(missing_ok=True)


def _problem(file: Rewritten, error: Exception) -> Problem:
    if isinstance(error, OSError):
        return Problem(file.file, 0, f"can't be written: {error.strerror or error}")
    return Problem(file.file, 0, str(error))
