"""The Python files under some paths, and which of them a dotted name means."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from megapg.migrate.python.methods import kept
from megapg.migrate.python.source import Problem

_PASSED_OVER = frozenset(
    {"__pycache__", "node_modules", "build", "dist", "site-packages", "venv", "env"}
)


@dataclass(frozen=True)
class File:
    """One Python file."""

    path: Path  # absolute, as it was reached
    name: str  # relative to the project, with forward slashes, for reports


def is_test(name: str) -> bool:
    """Whether a file is one of a test suite, by its name, which has forward slashes."""
    *folders, last = name.split("/")
    if any(each in ("test", "tests") or each.endswith("_tests") for each in folders):
        return True
    return last == "conftest.py" or last.startswith("test_") or last.endswith("_test.py")


@dataclass(frozen=True)
class Notebook:
    """A notebook in a directory: it is not read."""

    name: str  # relative to the project, with forward slashes, for reports


def is_notebook(path: Path) -> bool:
    """Whether a file is a notebook of Jupyter's, by its name."""
    return path.suffix.lower() == ".ipynb"


def find_files(
    paths: Sequence[Path], root: Path, exclude: Sequence[str] = ()
) -> Iterator[File | Notebook | Problem]:
    """Every Python file at or under the paths, each once, whatever links there are.

    Hidden directories, environments and build directories are passed over unless they are named.
    A notebook is none: its cells need not be Python, run in any order, and may lie in its JSON in
    ways that no writer of JSON gives back byte for byte.

    Args:
        paths: files and directories.
        root: of the project: names are relative to it.
        exclude: patterns on names, such as ``third_party/*``.
    """
    seen: set[tuple[int, int]] = set()
    for path in paths:
        path = Path(os.path.abspath(path))
        if not path.exists():
            yield Problem(str(path), 0, "does not exist")
        elif not path.is_dir():
            if is_notebook(path):
                yield Problem(_name(path, root), 0, "is a notebook, and notebooks are not read")
            else:
                yield from _once(path, root, (), seen)
        else:
            yield from _walk(path, root, exclude, seen)


def _walk(
    top: Path, root: Path, exclude: Sequence[str], seen: set[tuple[int, int]]
) -> Iterator[File | Notebook | Problem]:
    unreadable: list[Problem] = []

    def report(error: OSError) -> None:
        name = _name(Path(error.filename or top), root)
        unreadable.append(Problem(name, 0, f"can't be listed: {error.strerror}"))

    for folder, folders, names in os.walk(top, followlinks=True, onerror=report):
        here = Path(folder)
        if not _first_visit(here, seen):  # a link that leads back, or to what another one did
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not _passed_over(here / name))
        for name in sorted(names):
            if name.endswith((".py", ".pyi")):
                yield from _once(here / name, root, exclude, seen)
            elif is_notebook(here / name) and not _is_excluded(_name(here / name, root), exclude):
                yield Notebook(_name(here / name, root))
    yield from unreadable


def _once(
    path: Path, root: Path, exclude: Sequence[str], seen: set[tuple[int, int]]
) -> Iterator[File | Problem]:
    name = _name(path, root)
    if _is_excluded(name, exclude):
        return
    try:
        if not path.is_file():
            missing = not path.exists()
            yield Problem(name, 0, "is a link to nothing" if missing else "is no regular file")
        elif _first_visit(path, seen):
            yield File(path, name)
    except OSError as error:
        yield Problem(name, 0, f"can't be read: {error.strerror}")


def _is_excluded(name: str, exclude: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in exclude)


def _first_visit(path: Path, seen: set[tuple[int, int]]) -> bool:
    found = path.stat()
    key = (found.st_dev, found.st_ino)
    if key in seen:
        return False
    seen.add(key)
    return True


def _passed_over(folder: Path) -> bool:
    name = folder.name
    if name.startswith(".") or name in _PASSED_OVER:
        return True
    try:
        return (folder / "pyvenv.cfg").exists()
    except OSError:  # it can't be entered; the walk says so
        return False


def _name(path: Path, root: Path) -> str:
    try:
        return path.relative_to(root).as_posix()
    except ValueError:
        return path.as_posix()


class Modules:
    """Which file a dotted name means, seen from another file.

    Where a package's root is can't be told for certain (src layouts, namespace packages, scripts),
    so a name means the file whose path ends like it; of several the one nearest to who asks.
    """

    def __init__(self, files: Iterable[File]) -> None:
        self._by_last: dict[str, list[tuple[tuple[str, ...], Path]]] = {}
        self._parts: dict[Path, tuple[str, ...]] = {}
        self._packages: set[tuple[str, ...]] = set()
        self._tests: set[Path] = set()
        for file in files:
            if is_test(file.name):
                self._tests.add(file.path)
            parts = module_parts(file.path)
            self._parts[file.path] = parts
            if file.path.name == "__init__.py":
                self._packages.add(parts)
            if parts:
                self._by_last.setdefault(parts[-1], []).append((parts, file.path))

    def __contains__(self, path: Path) -> bool:
        return path in self._parts

    def is_test(self, path: Path) -> bool:
        """Whether a file is one of a test suite."""
        return path in self._tests

    def sources(self) -> Iterator[Path]:
        """The files that are in no test suite."""
        return (path for path in self._parts if path not in self._tests)

    def sees(self, path: Path, other: Path) -> bool:
        """Whether what is in one file may matter for another one: tests see source, and source
        sees no tests, so that it is rewritten alike with them and without.
        """
        return path in self._tests or other not in self._tests

    def find(self, dotted: Sequence[str], importer: Path) -> Path | None:
        """The file of an absolute import."""
        wanted = tuple(dotted)
        if not wanted or wanted[-1] not in self._by_last:
            return None
        return self._nearest(wanted, importer.parent.parts, self.is_test(importer))

    @kept
    def _nearest(
        self, wanted: tuple[str, ...], here: tuple[str, ...], for_a_test: bool
    ) -> Path | None:
        found = [
            (self._parts[path], path)
            for path in self.ending(wanted)
            if self._is_root(self._parts[path][: -len(wanted)], here)
            and (for_a_test or not self.is_test(path))
        ]
        if len(wanted) == 1:  # `import types` means no types.py elsewhere
            found = [each for each in found if self._at_top(each[1], here, wanted[0])]
        return max(found, key=lambda each: _shared(each[0], here), default=(None, None))[1]

    def ending(self, dotted: Sequence[str]) -> Iterator[Path]:
        """Every file that a dotted name could mean, wherever a program starts."""
        wanted = tuple(dotted)
        for parts, path in self._by_last.get(wanted[-1] if wanted else "", ()):
            if parts[-len(wanted) :] == wanted:
                yield path

    def _is_root(self, folder: tuple[str, ...], here: tuple[str, ...]) -> bool:
        """Whether absolute imports can start in a folder: it is no package, or a script's own."""
        return folder not in self._packages or folder == here

    def _at_top(self, path: Path, here: tuple[str, ...], word: str) -> bool:
        """Whether one word can mean it: a package in no package, the neighbour of a script, or a
        script in a folder around, from where all is run; no name of Python's own means the last.
        """
        outside = self._parts[path][:-1]
        is_around = here[: len(outside)] == outside and word not in sys.stdlib_module_names
        return outside not in self._packages and (
            path.stem == "__init__" or outside == here or is_around
        )

    def exactly(self, parts: Sequence[str]) -> Path | None:
        """The file that these parts lead to, from the root of the file system."""
        found = self._by_last.get(parts[-1], ()) if parts else ()
        return next((path for known, path in found if known == tuple(parts)), None)

    def parts(self, path: Path) -> tuple[str, ...]:
        """Those of a file."""
        return self._parts[path]


def relative_parts(importer: Path, level: int, dotted: Sequence[str]) -> tuple[str, ...]:
    """Where a relative import leads."""
    folder = importer.parent.parts
    return (*folder[: len(folder) - level + 1], *dotted)


def module_parts(path: Path) -> tuple[str, ...]:
    """``("/", "src", "a", "b")`` for ``/src/a/b.py`` and for ``/src/a/b/__init__.py``."""
    return path.parent.parts if path.stem == "__init__" else (*path.parent.parts, path.stem)


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[int, int]:
    """How far two paths agree; of equal ones the shorter first."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    return same, -len(one)
