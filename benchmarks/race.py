"""CPU time of ``megapg migrate`` against that of LibCST with qualified names, over the same files.

Both are processes of their own that read the same tree, in turns. Ours is the whole dry run as a
user has it, from the start of the interpreter to the diff; LibCST's is only what a codemod needs
before it can change anything.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.corpora import CACHE, Corpus, install, named

TARGET = 1 / 15
REPEATS = 3
LIBCST = "libcst==1.9.0"

_PEER = Path(__file__).with_name("libcst_peer.py")
# A file without either has nothing for a codemod to look at.
_TRIGGER = re.compile(rb"parallel_state|\bmpu\b")


@dataclass(frozen=True)
class Field:
    """Files to run over.

    Attributes:
        what: they are.
        corpora: from which.
        triggered: only those that name Megatron's globals.
    """

    what: str
    corpora: tuple[Corpus, ...]
    triggered: bool = False

    @contextmanager
    def laid_out(self) -> Iterator[Path]:
        """A project of their own: what lies around the trees has no say."""
        with tempfile.TemporaryDirectory(prefix="megapg-bench-") as folder:
            project = Path(folder)
            (project / "pyproject.toml").touch()
            for corpus in self.corpora:
                tree = corpus.wheel.tree()
                for path in tree.rglob("*.py"):
                    if not self.triggered or _TRIGGER.search(path.read_bytes()):
                        copied = project / tree.name / path.relative_to(tree)
                        copied.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(path, copied)
            yield project


FIELDS = (
    Field("mbridge and mcore_bridge, every file", (named("mbridge"), named("mcore_bridge"))),
    Field(
        "megatron-bridge, the files that name the globals",
        (named("megatron-bridge"),),
        triggered=True,
    ),
)


@dataclass(frozen=True)
class Race:
    """Seconds of CPU time, one for each repeat."""

    what: str
    files: int
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool:
        return self.ratio <= TARGET


def run(where: Field, on_progress: Callable[[], None] = lambda: None) -> Race:
    """Both, in turns."""
    packages = CACHE / LIBCST.replace("==", "-")
    install(LIBCST, packages)
    with where.laid_out() as project:
        core = where.corpora[0].core
        ours = [sys.executable, "-m", "megapg", "migrate", str(project), "--from-core", core]
        _cpu([sys.executable, "-m", "megapg", "migrate", "--help"], (0,))  # compiled from now on
        theirs = [sys.executable, str(_PEER), str(project)]
        seconds = []
        for _ in range(REPEATS):
            # 1: there are edits to make.
            seconds.append((_cpu(ours, (1,)), _cpu(theirs, (0,), PYTHONPATH=str(packages))))
            on_progress()
        files = sum(1 for _ in project.rglob("*.py"))
    return Race(where.what, files, *zip(*seconds, strict=True))


def _cpu(command: list[str], codes: tuple[int, ...], **environment: str) -> float:
    """Seconds of CPU time, user and system, of a process and of those that it started."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            # As what is installed runs: not compiled anew each time, whatever is set here.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
            cwd=_PEER.parents[1],
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in codes:
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {said}")
    return used.ru_utime + used.ru_stime
