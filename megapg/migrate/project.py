"""The Python files of a project, and the meanings of dotted names in it.

Only the top level of a module is read here, with :mod:`ast`: its imports, functions, classes and
simple aliases.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path

from megapg.migrate.config import Config
from megapg.migrate.migration import Problem
from megapg.migrate.toplevel import Table, read_table
from megapg.upstream.helpers import CORE, HELPERS_OF_CORE
from megapg.upstream.signatures import SIGNATURES

PARALLEL_STATE = "megatron.core.parallel_state"
OWN_MODULE = "/megatron/core/parallel_state.py"  # defines the globals, and does not use them
_NAMES_OF_THE_MODULE = (PARALLEL_STATE, "megatron.core.mpu")
# Megatron's own modules import getters, and other code imports them from there.
_REEXPORTED = re.compile(r"megatron\.(?:core|training|legacy)\.(?:\w+\.)+(\w+)")
_GETTER = re.compile(r"get_\w+_(group|rank|ranks|world_size)$")
_REPORTED = frozenset({"build", "dist", "env", "venv"})  # may hold sources after all
_SKIPPED = _REPORTED | {"__pycache__", "node_modules", "site-packages"}
_WORD = re.compile(rb"\w+")
_MOST_IMPORTS = 20  # followed from one name: imports may be circular


def is_test(name: str) -> bool:
    """True if a file, by its path with forward slashes, belongs to a test suite."""
    *folders, last = name.split("/")
    if any(each in ("test", "tests") or each.endswith("_tests") for each in folders):
        return True
    return last == "conftest.py" or last.startswith("test_") or last.endswith("_test.py")


def is_notebook(path: Path) -> bool:
    """True if a file is a Jupyter notebook."""
    return path.suffix.lower() == ".ipynb"


@dataclass(frozen=True)
class Meaning:
    """The meaning of a dotted name."""

    name: str  # the dotted name after all imports; getters begin with ``PARALLEL_STATE``
    path: Path | None = None  # the module of the project that defines it
    local: str = ""  # its qualified name in that module; empty for the module itself


class Project:
    """The files at and under some paths.

    Attributes:
        files: path -> name in reports, relative to the project's root.
        notebooks: number of notebooks, which are not read.
        skipped: folders that are skipped by their name -> number of Python files in them. Virtual
            environments do not count.
        problems: files that can't be read.
        own: wrapper that holds groups of its own -> the functions that it defines.
    """

    def __init__(self, paths: Sequence[Path], config: Config) -> None:
        self.config: Config = config
        self.own: Mapping[str, Container[str]] = {}
        self.files: dict[Path, str] = {}
        self.notebooks = 0
        self._skipped: list[Path] = []
        self.problems: list[Problem] = []
        self._data: dict[Path, bytes] = {}
        self._tables: dict[Path, Table] = {}
        visited: set[str] = set()
        for path in paths:
            self._add(Path(os.path.abspath(path)), visited)
        numbers = {self.name(each): self._unread(each) for each in self._skipped}
        self.skipped = {name: number for name, number in numbers.items() if number}

    def _add(self, path: Path, visited: set[str]) -> None:
        if not path.is_dir():
            self._add_file(path, visited, named=True)
            return
        for folder, folders, names in os.walk(path, followlinks=True):
            real = os.path.realpath(folder)
            if real in visited:  # a link to a folder above, or to one that was read before
                folders.clear()
                continue
            visited.add(real)
            skipped = {each for each in folders if _is_skipped(Path(folder, each))}
            self._skipped += [Path(folder, each) for each in sorted(skipped & _REPORTED)]
            folders[:] = sorted({*folders} - skipped)
            for name in sorted(names):
                self._add_file(Path(folder, name), visited)

    def _unread(self, folder: Path) -> int:
        """Return the number of Python files in a folder that are neither read nor excluded."""
        if any((folder / each).exists() for each in ("pyvenv.cfg", "conda-meta")):
            return 0
        unread = (each for each in folder.rglob("*.py") if each not in self.files)
        return sum(not self._is_excluded(self.name(each)) for each in unread)

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.config.exclude)

    def _add_file(self, path: Path, visited: set[str], named: bool = False) -> None:
        name, real = self.name(path), os.path.realpath(path)
        if real in visited or self._is_excluded(name):
            return
        visited.add(real)
        if is_notebook(path):
            self.notebooks += 1
            if named:
                self.problems.append(Problem(name, 0, "is a notebook, and notebooks are not read"))
        elif named or path.suffix in (".py", ".pyi"):
            try:
                self._data[path] = path.read_bytes()
                self.files[path] = name
            except OSError as error:
                self.problems.append(Problem(name, 0, f"can't be read: {error.strerror}"))

    def name(self, path: Path) -> str:
        """Return the path relative to the project's root, with forward slashes."""
        root = self.config.root
        return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()

    def data(self, path: Path) -> bytes:
        """Return the bytes of a file."""
        return self._data[path]

    def mentioning(self, pattern: re.Pattern[bytes]) -> Iterator[Path]:
        """Yield the files whose bytes match a pattern."""
        return (path for path, data in self._data.items() if pattern.search(data))

    # -- modules -----------------------------------------------------------------------------------

    def module(self, path: Path) -> str:
        """Return the dotted name of a file in its outermost package."""
        parts = [path.parent.name, path.stem] if path.stem == "__init__" else [path.stem]
        parts = parts[:-1] if path.stem == "__init__" else parts
        folder = path.parent.parent if path.stem == "__init__" else path.parent
        while (folder / "__init__.py").exists() or folder.name == "megatron":  # a namespace package
            parts.insert(0, folder.name)
            folder = folder.parent
        return ".".join(parts)

    def absolute(self, dotted: str, path: Path) -> str:
        """Return a dotted name without leading dots, which are relative to the file's package."""
        level = len(dotted) - len(dotted.lstrip("."))
        if not level:
            return dotted
        package = self.module(path).split(".")
        up = level - 1 if path.stem == "__init__" else level
        base = package[: len(package) - up] if up else package
        return ".".join([*base, *filter(None, [dotted[level:]])])

    @cached_property
    def _by_last_part(self) -> dict[str, list[tuple[tuple[str, ...], Path]]]:
        found = defaultdict(list)
        for path in self.files:
            parts = (path.parent if path.stem == "__init__" else path.with_suffix("")).parts
            found[parts[-1]].append((parts, path))
        return found

    @cache  # noqa: B019 (a project lives as long as the command)
    def find(self, dotted: str, importer: Path) -> Path | None:
        """Return the file of a module, or None if it is not in the project or not certain.

        Absolute imports begin at a folder that is no package: the one nearest to the importer.
        """
        wanted = tuple(dotted.split("."))
        found = []
        for parts, path in self._by_last_part.get(wanted[-1], ()):
            top = Path(*parts[: len(parts) - len(wanted)])
            if parts[-len(wanted) :] != wanted:
                continue
            if top == importer.parent or not (top / "__init__.py").exists():
                found.append((top, path))
        near = [each for each in found if importer.is_relative_to(each[0])]
        if near:
            return max(near, key=lambda each: len(each[0].parts))[1]
        return found[0][1] if len(found) == 1 and len(wanted) > 1 else None

    def table(self, path: Path) -> Table:
        """Return the top-level names of a file; an empty table if it is no valid Python."""
        if path not in self._tables:
            self._tables[path] = Table()
            with contextlib.suppress(SyntaxError, ValueError, RecursionError):
                tree = ast.parse(self._data[path])
                self._tables[path] = read_table(tree, lambda dotted: self.absolute(dotted, path))
        return self._tables[path]

    # -- names -------------------------------------------------------------------------------------

    def meaning(self, dotted: str, importer: Path) -> Meaning:
        """Return what an absolute dotted name stands for, after all imports on its way."""
        for _ in range(_MOST_IMPORTS):
            state = self._in_parallel_state(dotted, importer)
            if state is not None:
                return Meaning(state)
            step = self._step(dotted, importer)
            if isinstance(step, Meaning):
                return step
            if step == dotted:
                break
            dotted = step
        if dotted.removeprefix(CORE) in HELPERS_OF_CORE:  # one has the name of a getter
            return Meaning(dotted)
        reexported = _REEXPORTED.fullmatch(dotted)
        if reexported and reexported[1] in SIGNATURES:
            return Meaning(f"{PARALLEL_STATE}.{reexported[1]}")
        return Meaning(dotted)

    def _in_parallel_state(self, dotted: str, importer: Path) -> str | None:
        """Return a name of ``parallel_state`` or of a wrapper, without what the wrapper adds."""
        for module in (*_NAMES_OF_THE_MODULE, *sorted(self.config.wrappers, key=len, reverse=True)):
            if dotted == module:
                return PARALLEL_STATE
            if dotted.startswith(module + "."):
                rest = dotted[len(module) + 1 :]
                name = rest.partition(".")[0]
                if module in _NAMES_OF_THE_MODULE or not self._adds(module, name, importer):
                    return f"{PARALLEL_STATE}.{'fork.' * self._differs(module, name)}{rest}"
        return None

    def _differs(self, wrapper: str, name: str) -> bool:
        """True if a getter of a fork's own groups may have another meaning than Megatron-core's.

        If there is a rank in "model parallel", that is the fork's name of tensor parallelism.
        """
        functions = self.own.get(wrapper, ())
        return name == "get_model_parallel_group" and "get_model_parallel_rank" in functions

    def _adds(self, wrapper: str, name: str, importer: Path) -> bool:
        """True if a name of a wrapper is a submodule, or something that is no getter."""
        if self.find(f"{wrapper}.{name}", importer) is not None:
            return True
        home = self.find(wrapper, importer)
        if home is None or name in SIGNATURES:
            return False
        if name in self.own.get(wrapper, ()) and _GETTER.match(name):
            return False
        table = self.table(home)
        return name in {*table.classes, *table.functions, *table.imports}

    def _step(self, dotted: str, importer: Path) -> Meaning | str:
        """Follow one import: the name that it leads to, or the meaning if none is left."""
        found = self.split(dotted, importer)
        if found is None:
            return dotted
        path, rest = found
        return self._in_module(path, dotted, rest) if rest else Meaning(dotted, path)

    def _in_module(self, path: Path, dotted: str, rest: Sequence[str]) -> Meaning | str:
        """Follow a name in a module; a name with several meanings has none."""
        table, name = self.table(path), rest[0]
        is_defined = name in table.functions or name in table.classes
        if name in table.others or (is_defined and name in table.imports):
            return Meaning(dotted)
        if is_defined:
            return Meaning(dotted, path, ".".join(rest))
        if name in table.imports:
            several = [".".join([each, *rest[1:]]) for each in sorted(table.imports[name])]
            if len(several) == 1:
                return several[0]
            meanings = {self.meaning(each, path) for each in several if each != dotted}
            return meanings.pop() if len(meanings) == 1 else Meaning(dotted)
        for module in table.stars:
            source = self.find(module, path)
            names = self.table(source) if source else Table()
            in_star = name in {*names.functions, *names.classes, *names.imports}
            if in_star or self._in_parallel_state(module, path):
                return ".".join([module, *rest])
        return Meaning(dotted)

    def is_star_imported(self, path: Path) -> bool:
        """True if another file has ``from module import *`` of this module."""
        return path in self._star_imported

    @cached_property
    def _star_imported(self) -> set[Path | None]:
        stars = self.mentioning(re.compile(rb"import[ \t]*\*"))
        return {self.find(module, path) for path in stars for module in self.table(path).stars}

    def split(self, dotted: str, importer: Path) -> tuple[Path, tuple[str, ...]] | None:
        """Return the module of the project that a dotted name begins with, and the rest of it."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            path = self.find(".".join(parts[:end]), importer)
            if path is not None:
                return path, tuple(parts[end:])
        return None

    def importers(self, names: Collection[tuple[Path, str]]) -> set[Path]:
        """Return the files that import one of some names, or its module.

        Args:
            names: each with the module that defines it.
        """
        of_module: dict[Path, set[bytes]] = defaultdict(set)
        for path, name in names:
            of_module[path].add(name.encode())
        words = sorted(set().union(*of_module.values()))
        found = set()
        for path in self.mentioning(re.compile(rb"\b(%b)\b" % b"|".join(words))):
            mentioned = set(_WORD.findall(self._data[path]))
            for dotted in set().union(*self.table(path).everywhere.values()):
                dotted = dotted.removesuffix(".*")
                meaning, at = self.meaning(dotted, path), self.split(dotted, path)
                places = [(meaning.path, meaning.local.partition(".")[0])]
                places += [(at[0], at[1][0] if at[1] else "")] if at is not None else []
                for home, word in places:
                    wanted = of_module.get(home, set()) if home is not None else set()
                    if word.encode() in wanted or (not word and wanted & mentioned):
                        found.add(path)
        return found

    def is_imported(self, path: Path, name: str, scanned: Collection[Path]) -> bool:
        """True if another file takes an imported name from this module.

        Args:
            path: of the module.
            name: the name.
            scanned: files whose uses of the globals are known: only their imports count.
        """
        module = self.module(path).rpartition(".")[2].encode()
        word = name.encode()
        attribute = re.compile(rb"\b%b\.%b\b" % (re.escape(module), word))
        for other in self.mentioning(re.compile(rb"\b%b\b" % re.escape(module))):
            if other == path:
                continue
            if other not in scanned and attribute.search(self._data[other]):
                return True
            for dotted in set().union(*self.table(other).everywhere.values()):
                home, _, last = dotted.rpartition(".")
                if last in (name, "*") and self.find(home, other) == path:
                    return True
        return False


def _is_skipped(folder: Path) -> bool:
    if folder.name in _SKIPPED:
        return not (folder / "__init__.py").exists() or folder.name == "__pycache__"
    return folder.name.startswith(".") or (folder / "pyvenv.cfg").exists()
