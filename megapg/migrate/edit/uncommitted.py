"""Which files have changes that git has in no commit."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_AT_ONCE = 200  # files in one command line
_SECONDS = 60
# Without locks, and without the program that a repository may name to watch its files.
_STATUS = (
    *("git", "--no-optional-locks", "--literal-pathspecs", "-c", "core.fsmonitor=false"),
    *("status", "--porcelain", "-z", "--untracked-files=all", "--ignored", "--"),
)
# What hooks of git say of another repository.
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")


def uncommitted(files: Iterable[Path]) -> tuple[set[Path], dict[Path, str]]:
    """Those of the files that are in a repository of git and not as they were committed, such as
    git does not know or passes over included, without links; and of which repositories git refuses
    to tell, and why. Where there is no git nobody expects it to.
    """
    by_repository: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        real = Path(os.path.realpath(file))
        for folder in real.parents:
            if (folder / ".git").exists():
                by_repository[folder].append(real)
                break
    found: set[Path] = set()
    unanswered: dict[Path, str] = {}
    for repository, some in by_repository.items():
        for at in range(0, len(some), _AT_ONCE):
            asked = some[at : at + _AT_ONCE]
            try:
                changed = {repository / name for name in _changed(repository, asked)}
            except subprocess.SubprocessError as error:
                said = os.fsdecode(getattr(error, "stderr", b"") or b"").strip()
                if "not a git repository" not in said:
                    unanswered[repository] = said.partition("\n")[0].rstrip(".") or str(error)
                break
            found |= {file for file in asked if not changed.isdisjoint((file, *file.parents))}
    return found, unanswered


def _changed(repository: Path, files: Sequence[Path]) -> Iterator[str]:
    environment = {key: value for key, value in os.environ.items() if key not in _OF_A_HOOK}
    environment["LC_ALL"] = "C"
    try:
        said = subprocess.run(
            [*_STATUS, *(str(file.relative_to(repository)) for file in files)],
            cwd=repository,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        ).stdout
    except OSError:
        return
    entries = iter(os.fsdecode(said).split("\0"))
    for entry in entries:
        if entry:
            yield entry[3:]
        if entry[:1] in ("R", "C") or entry[1:2] in ("R", "C"):
            next(entries, None)  # what it was called before
