"""What the last ``megapg migrate --write`` changed, kept so that it can be put back.

All of it is on disk before the first file is replaced, and whole or not at all: a process that is
killed has replaced nothing, or what is kept here. It is a zip in ``.megapg`` of the project, which
git passes over: ``undo.json`` names the files, beside it is each of them as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.edit.write import settle, write_files
from megapg.migrate.migration import Rewritten
from megapg.migrate.python.source import Problem

_FOLDER, _FILE, _LIST = ".megapg", "undo.zip", "undo.json"
_FORMER = "undo.zip.old"  # until the first file of the next write is replaced
_FORMAT = 1
# A RuntimeError: encrypted, or of a method that this Python does not know.
_UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError),
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError),
)


@dataclass(frozen=True)
class _Kept:
    """A file as it was."""

    name: str  # relative to the project where it is in it
    path: Path
    original: bytes  # before it was written
    written: str  # SHA-256 of what was written
    is_new: bool  # whether there was no such file


@dataclass(frozen=True)
class Undone:
    """What became of the files."""

    put_back: Sequence[str]  # names of those that are as they were again
    untouched: int  # how many were so all the time
    problems: Sequence[Problem]  # those that were left as they are, and why


def keep(files: Sequence[Rewritten], root: Path) -> None:
    """Keep what files are before they are written. What was kept before goes once one is.

    Args:
        files: that are to be written.
        root: of the project.

    Raises:
        OSError: that is not possible. What was kept before is there.
    """
    folder = root / _FOLDER
    with suppress(UnsupportedOptionError):
        _choose(folder, root)
    if (folder / _FILE).exists():
        _copy(folder / _FILE, folder / _FORMER)
    _store(files, root)


def keep_only(files: Sequence[Rewritten], root: Path) -> None:
    """Of what :func:`keep` was given these files were written: only they can be put back. Without
    any it is what was kept before.

    Args:
        files: that were written.
        root: of the project.

    Raises:
        OSError: that is not possible, and all of them are kept.
    """
    folder = root / _FOLDER
    if files:
        _store(files, root)
        (folder / _FORMER).unlink(missing_ok=True)
    elif (folder / _FORMER).exists():
        os.replace(folder / _FORMER, folder / _FILE)
    else:
        _forget(folder)


def _store(files: Sequence[Rewritten], root: Path) -> None:
    folder = root / _FOLDER
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("# Made by megapg migrate.\n*\n", encoding="utf-8")
    handle, name = tempfile.mkstemp(".new", f"{_FILE}-", folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(_LIST, json.dumps(_listed(files, root)))
                for number, file in enumerate(files):
                    archive.writestr(str(number), file.before)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, folder / _FILE)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    settle(folder)
    settle(root)


def _choose(folder: Path, root: Path) -> None:
    """Of two records, which a write that was interrupted leaves, have the one that counts: the
    former where nothing was written since.
    """
    if not (folder / _FORMER).exists():
        return
    written = False
    for each in _read(folder / _FILE, root):
        try:
            written = written or each.path.read_bytes() != each.original or each.is_new
        except OSError:
            written = written or not each.is_new
    if written:
        (folder / _FORMER).unlink()
    else:
        os.replace(folder / _FORMER, folder / _FILE)


def _copy(file: Path, other: Path) -> None:
    """Give a file another name as well; it is never written to."""
    other.unlink(missing_ok=True)
    try:
        os.link(file, other)
    except OSError:  # no hard links here
        shutil.copyfile(file, other)


def _listed(files: Sequence[Rewritten], root: Path) -> dict[str, object]:
    listed = []
    for file in files:
        name = file.path.relative_to(root) if file.path.is_relative_to(root) else file.path
        written = hashlib.sha256(file.after).hexdigest()
        listed.append({"name": str(name), "written": written, "new": file.is_new})
    return {"format": _FORMAT, "files": listed}


def undo(root: Path, within: Sequence[Path] = ()) -> Undone:
    """Put back the files of the last ``--write`` that are what it made of them.

    Args:
        root: of the project.
        within: files that are not in the project are put back in these directories only.

    Raises:
        UnsupportedOptionError: nothing is kept, or it can't be read.
    """
    waiting: list[Rewritten] = []
    problems: list[Problem] = []
    untouched = 0
    allowed = [root, *map(Path, map(os.path.abspath, within))]
    with suppress(OSError, UnsupportedOptionError):
        _choose(root / _FOLDER, root)
    for each in _read(root / _FOLDER / _FILE, root):
        if not any(each.path.is_relative_to(folder) for folder in allowed):
            why = "is not in the project: name its directory to have it put back"
            problems.append(Problem(each.name, 0, why))
            continue
        if each.is_new and not os.path.lexists(each.path):
            untouched += 1
            continue
        try:
            now = each.path.read_bytes()
        except OSError as error:
            problems.append(Problem(each.name, 0, f"can't be read: {error.strerror or error}"))
            continue
        if now == each.original and not each.is_new:
            untouched += 1
        elif hashlib.sha256(now).hexdigest() != each.written:
            problems.append(Problem(each.name, 0, "was changed since, and is left as it is"))
        else:
            file = Rewritten(each.name, each.path, now, each.original, "", (), is_new=each.is_new)
            waiting.append(file)
    made = [each for each in waiting if each.is_new]
    failed = [p for each in waiting if not each.is_new for p in write_files([each])]
    if problems or failed:  # what is left as it is may import them
        why = "is left, for not all files are as they were"
        failed += [Problem(each.file, 0, why) for each in made]
    else:
        failed += _remove(made)
    names = {problem.file for problem in failed}
    if not (problems or failed):
        _forget(root / _FOLDER)
    return Undone([f.file for f in waiting if f.file not in names], untouched, [*problems, *failed])


def _remove(files: Sequence[Rewritten]) -> list[Problem]:
    """Remove files; those that are still there, and why."""
    problems = []
    for each in files:
        try:
            each.path.unlink()
        except OSError as error:
            problems.append(Problem(each.file, 0, f"can't be removed: {error.strerror or error}"))
    return problems


def _read(file: Path, root: Path) -> list[_Kept]:
    try:
        with zipfile.ZipFile(file) as archive:
            listed = json.loads(archive.read(_LIST))
            if listed["format"] != _FORMAT:
                raise ValueError(f"format {listed['format']}")
            return [
                _Kept(
                    each["name"],
                    Path(os.path.normpath(root / each["name"])),
                    archive.read(str(number)),
                    each["written"],
                    each.get("new", False),
                )
                for number, each in enumerate(listed["files"])
            ]
    except FileNotFoundError:
        raise UnsupportedOptionError(
            f"there is nothing to put back: no {file}, which megapg migrate --write makes."
        ) from None
    except _UNREADABLE as error:
        raise UnsupportedOptionError(
            f"{file} can't be read, and nothing is put back: {error}"
        ) from error


def _forget(folder: Path) -> None:
    with suppress(OSError):
        (folder / _FORMER).unlink(missing_ok=True)
        (folder / _FILE).unlink()
        (folder / ".gitignore").unlink()
        folder.rmdir()
