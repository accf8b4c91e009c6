"""Run the project's own formatter and import sorter on the new texts.

A tool is run if the project configures it, it is installed, and it would not change the old text.
ruff sorts imports only if the project selects its rules for that. Texts go through standard input,
so no file on disk changes.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megapg.migrate.migration import Rewritten

_WORKERS = 2
_SECONDS = 60  # for one text


@dataclass(frozen=True)
class _Tool:
    """A formatter or import sorter."""

    program: str
    arguments: tuple[str, ...]  # the file's name follows
    settings: tuple[tuple[str, str], ...]  # files, and the title of its section; empty for any
    hook: str  # its id in ``.pre-commit-config.yaml``


_RUFF = ((".ruff.toml", ""), ("ruff.toml", ""), ("pyproject.toml", "tool.ruff"))
_ISORT = (
    *((".isort.cfg", ""), ("pyproject.toml", "tool.isort"), ("tox.ini", "isort")),
    *(("setup.cfg", "isort"), ("setup.cfg", "tool:isort")),
)
_BLACK = (("pyproject.toml", "tool.black"),)
_RUFF_SORT = ("check", "--quiet", "--fix-only", "--fixable", "I", "-", "--stdin-filename")
# Only the first tool that fits is run.
_SORTERS = (
    _Tool("isort", ("-", "--quiet", "--filename"), _ISORT, "isort"),
    _Tool("ruff", _RUFF_SORT, _RUFF, "ruff"),
)
_FORMATTERS = (
    _Tool("black", ("-", "--quiet", "--stdin-filename"), _BLACK, "black"),
    _Tool("ruff", ("format", "--quiet", "-", "--stdin-filename"), _RUFF, "ruff-format"),
)


def formatted(
    files: Sequence[Rewritten], root: Path, on_progress: Callable[[str, int, int], None]
) -> tuple[list[Rewritten], Counter[str]]:
    """Return the files with new texts in the project's format.

    Return also the programs that are configured but not installed, with a number of files.

    Args:
        files: the rewritten files.
        root: of the project. Settings are searched up to it, or up to the root of its repository.
        on_progress: called with "formatting", the number of files that are done, and of all.
    """
    top = next((each for each in (root, *root.parents) if (each / ".git").exists()), root)
    done, missing = list[Rewritten](), Counter[str]()
    with ThreadPoolExecutor(_WORKERS) as pool:
        for file, programs in pool.map(lambda each: _formatted(each, top), files):
            done.append(file)
            missing.update(programs)
            on_progress("formatting", len(done), len(files))
    return done, missing


def _formatted(file: Rewritten, top: Path) -> tuple[Rewritten, set[str]]:
    missing = set[str]()
    # The module of --runtime vendored keeps the order of its lines: its checksum depends on that.
    for tools in (_FORMATTERS,) if file.is_runtime else (_SORTERS, _FORMATTERS):
        absent = set[str]()
        for tool in tools:
            if not _is_configured(tool, file.path.parent, top):
                continue
            program = _start(tool.program)
            if not program:
                absent.add(tool.program)
                continue
            command = (*program, *tool.arguments, str(file.path))
            after = _output(command, file.after)
            if after == file.after:
                break  # the old text matters only if the tool changes the new one
            if after and (file.is_new or _output(command, file.before) == file.before):
                file = replace(file, after=after)
                break
        else:
            missing |= absent  # and no other tool took its place
    return file, missing


@cache
def _start(program: str) -> tuple[str, ...]:
    """The start of a command line; empty if the program is not installed."""
    if found := shutil.which(program):
        return (found,)
    if importlib.util.find_spec(program):
        return (sys.executable, "-P", "-m", program)  # -P: not a module in the current folder
    return ()


def _output(command: Sequence[str], text: bytes) -> bytes | None:
    """The text as a tool writes it; None if the tool fails."""
    folder = Path(command[-1]).parent
    try:
        return subprocess.run(
            command, input=text, cwd=folder, capture_output=True, timeout=_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def _is_configured(tool: _Tool, folder: Path, top: Path) -> bool:
    """True if the folder, or one above it up to the top, has settings of the tool."""
    patterns = {
        (name, rf"^\[{re.escape(title)}[].]" if title else "") for name, title in tool.settings
    }
    patterns.add((".pre-commit-config.yaml", rf"^[-\s]*id:\s*{tool.hook}\s*(#|$)"))
    if any(_matches(folder / name, pattern) for name, pattern in patterns):
        return True
    return folder not in (top, folder.parent) and _is_configured(tool, folder.parent, top)


def _matches(file: Path, pattern: str) -> bool:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return re.search(pattern, text, re.MULTILINE) is not None
