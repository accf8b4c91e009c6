"""Write rewritten files to disk, and find changes that git could not restore."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.migration import Problem, Rewritten

_STATUS = (  # without locks, and without the file watcher that a repository may configure
    *("git", "--no-optional-locks", "--literal-pathspecs", "-c", "core.fsmonitor=false"),
    *("status", "--porcelain", "-z", "--untracked-files=all", "--ignored", "--"),
)
_FILES_PER_COMMAND = 200
_STATES = {"??": "is not in git", "!!": "is ignored by git"}


@dataclass(frozen=True)
class _Staged:
    """A temporary file with the new bytes."""

    file: Rewritten
    target: Path  # the file to replace; for a link, the file that it points to
    new: Path  # the temporary file next to it


def write_files(files: Sequence[Rewritten]) -> list[Problem]:
    """Write all files, or none, and return the problems.

    A file is refused if its bytes changed since they were read, or if it is read-only. Each new
    text goes to a temporary file first, and the files are replaced once all of them are there. Mode
    and owner are kept, and links are followed.
    """
    staged, problems = list[_Staged](), list[Problem]()
    try:
        for file in files:
            try:
                staged.append(_stage(file))
            except OSError as error:
                problems.append(_problem(file, error))
        for number, each in enumerate(() if problems else staged):
            try:
                os.replace(each.new, each.target)
            except OSError as error:
                return [_problem(each.file, error), *_restore(staged[:number])]
    finally:
        for each in staged:
            each.new.unlink(missing_ok=True)
    return problems


def _stage(file: Rewritten) -> _Staged:
    target = Path(os.path.realpath(file.path))
    found = None
    if file.is_new:
        if os.path.lexists(target):
            raise OSError("it was created meanwhile")
    else:
        found = target.stat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no regular file")
        if not found.st_mode & 0o222 or not os.access(target, os.W_OK):  # root may write anything
            raise OSError("it is read-only")
        if target.read_bytes() != file.before:
            raise OSError("it was changed meanwhile")
    return _Staged(file, target, _temporary(target, file.after, found))


def _temporary(target: Path, data: bytes, found: os.stat_result | None) -> Path:
    """Write a temporary file next to the target, with the target's mode and owner."""
    handle, name = tempfile.mkstemp(".new", f".{target.name[:40]}.megapg-", target.parent)
    new = Path(name)
    try:
        with open(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if found is None:  # readable by those who may read the folder
            new.chmod(stat.S_IMODE(target.parent.stat().st_mode) & 0o666)
        else:
            if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(new, found.st_uid, found.st_gid)
            shutil.copystat(target, new)
            os.utime(new)  # the bytecode of the old file must look outdated
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    return new


def _restore(staged: Sequence[_Staged]) -> Iterator[Problem]:
    """Put the old files back after an error."""
    for each in staged:
        try:
            if each.file.is_new:
                each.target.unlink()
            else:
                old = _temporary(each.target, each.file.before, each.target.stat())
                os.replace(old, each.target)
        except OSError as error:
            yield Problem(each.file.file, 0, f"is written and can't be restored: {error.strerror}")


def _problem(file: Rewritten, error: OSError) -> Problem:
    return Problem(file.file, 0, f"can't be written: {error.strerror or error}")


def uncommitted(files: Mapping[Path, str]) -> list[str]:
    """Return a line for each file that git could not restore: its name, and why.

    Args:
        files: with their names in reports.
    """
    reasons: dict[str, str] = {}
    by_repository: dict[Path, dict[Path, str]] = defaultdict(dict)
    for path, name in files.items():
        real = Path(os.path.realpath(path))
        repository = next((each for each in real.parents if (each / ".git").exists()), None)
        if repository is None:
            reasons[name] = "is in no git repository"
        else:
            by_repository[repository][real] = name
    for repository, names in by_repository.items():
        try:
            states = _states(repository, list(names))
        except (OSError, subprocess.SubprocessError):
            states = dict.fromkeys(names, "can't be checked: git status fails")
        reasons |= {names[path]: state for path, state in states.items() if path in names}
    return [f"{name} {reason}" for name, reason in sorted(reasons.items())]


def _states(repository: Path, files: Sequence[Path]) -> dict[Path, str]:
    """The files that differ from the last commit, by ``git status``."""
    # Hooks of git set variables such as GIT_DIR, which may name another repository.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    found = {}
    for start in range(0, len(files), _FILES_PER_COMMAND):
        names = [str(file.relative_to(repository)) for file in files[start:][:_FILES_PER_COMMAND]]
        done = subprocess.run(
            [*_STATUS, *names], cwd=repository, env=environment, capture_output=True, check=True
        )
        for entry in os.fsdecode(done.stdout).split("\0"):
            if entry[2:3] == " ":  # else the old name of a renamed file
                found[repository / entry[3:]] = _STATES.get(entry[:2], "has uncommitted changes")
    return found
