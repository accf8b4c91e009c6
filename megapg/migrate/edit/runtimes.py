"""From where each rewritten file imports what it calls: megapg, or a module of its own package."""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.config import Config
from megapg.migrate.edit.vendored import Written, is_known, read, same, text_of
from megapg.migrate.find.index import Index
from megapg.migrate.migration import Edit, Rewritten
from megapg.migrate.python.imports import MEGAPG, Origin, Runtime
from megapg.migrate.python.methods import kept
from megapg.migrate.python.source import Problem

_IMPORT = re.compile(rb"^(?:from|import)[ \t]+([A-Za-z_]\w*(?:\.\w+)+)", re.MULTILINE)
_RELATIVE = re.compile(rb"^from[ \t]+\.", re.MULTILINE)


class Runtimes:
    """Says what the new text of each file calls, and makes the modules that are needed for it.

    Args:
        index: the project.
        config: what the run is told.

    Attributes:
        problems: modules that are left as they are, and why.
    """

    def __init__(self, index: Index, config: Config) -> None:
        self._index, self._config = index, config
        self.problems: list[Problem] = []

    def of(self, path: Path) -> Runtime:
        """What the new text of a file calls."""
        if not self._config.vendored:
            return MEGAPG
        _, origin = self._home(path)
        return Runtime(origin, origin)

    def with_modules(self, files: Sequence[Rewritten]) -> list[Rewritten]:
        """The rewritten files with the modules that they import, each of which they require.

        Raises:
            UnsupportedOptionError: there is a file of that name that is not ours, or that was
                edited and lacks what is needed.
        """
        if not self._config.vendored:
            return list(files)
        self.problems = []
        used: dict[Path, set[str]] = defaultdict(set)
        for path in self._index.everywhere(self._config.vendored):
            if path.stem == self._config.vendored and read(self._text(path)) is not None:
                used[path] = set()
        call = re.compile(rf"\b_?{self._config.vendored}_?\.(\w+)")
        requiring = []
        for file in files:
            calls = {name for edit in file.edits for name in call.findall(edit.new)}
            if calls:
                module, _ = self._home(file.path)
                used[module] |= set(filter(is_known, calls))
                file = replace(file, requires=file.requires | {self._name(module)})
            requiring.append(file)
        modules = (self._module(path, names) for path, names in sorted(used.items()))
        return [*requiring, *(module for module in modules if module is not None)]

    # -- where it is ---------------------------------------------------------------------------

    @kept
    def _home(self, path: Path) -> tuple[Path, Origin]:
        """The module of a file's package, and how the file imports it."""
        name = self._config.vendored
        package, own = self._package(path), self._own(path)
        data = self._index.data(path)
        top = own[0] if own else None
        if top is None and not _RELATIVE.search(data):  # maybe a script: what it imports is there
            top = next(self._others(path), None)
        if top is None:  # a file beside it may say, or of one in no package who imports it
            parts = path.with_suffix("").parts
            top = max(
                (
                    folder
                    for folder in path.parents
                    if folder in self._tops
                    and (package or ".".join(parts[len(folder.parts) - 1 :]) in self._names)
                ),
                key=lambda folder: (self._tops[folder], -len(folder.parts)),
                default=None,
            )
        if top is not None:
            home = package if package is not None and top in package.parents else top
            parts = home.parts[len(top.parts) - 1 :]
            statement = f"from {'.'.join(parts)} import {name}"
            return home / f"{name}.py", Origin(name, (parts, name), statement)
        if package is None:
            return path.parent / f"{name}.py", Origin(name, ((name,), ""), f"import {name}")
        dots = "." * (len(path.parent.parts) - len(package.parts) + 1)
        return package / f"{name}.py", Origin(name, ((dots,), name), f"from {dots} import {name}")

    @cached_property
    def _tops(self) -> Counter[Path]:
        """The folders from whose names on their own files import each other, and how many do."""
        return Counter(top for path in self._index.everywhere("import") for top in self._own(path))

    @cached_property
    def _names(self) -> set[str]:
        """The names by which some file imports something."""
        files = self._index.everywhere("import")
        return {".".join(parts) for path in files for parts in self._imports(path)}

    @kept
    def _own(self, path: Path) -> list[Path]:
        """The folders around a file at whose names absolute imports of it begin."""
        found: dict[Path, None] = {}
        for first, *rest in self._imports(path):
            for folder in path.parents:
                inside = Path(folder, *rest[:1])
                if folder.name == first and (inside.is_dir() or inside.with_suffix(".py").exists()):
                    found[folder] = None
        return list(found)

    def _others(self, path: Path) -> Iterator[Path]:
        """The packages of the project elsewhere at whose names absolute imports of a file begin."""
        for parts in self._imports(path):
            module = self._index.modules.find(parts, path)
            if module is not None:
                whole = self._index.modules.parts(module)
                folder = Path(*whole[: len(whole) - len(parts) + 1])
                if folder in self._tops or (folder / "__init__.py").exists():
                    yield folder

    def _imports(self, path: Path) -> Iterator[list[str]]:
        """The modules of which a file imports something when it is imported."""
        for dotted in _IMPORT.findall(self._index.data(path)):
            yield dotted.decode().split(".")

    def _package(self, path: Path) -> Path | None:
        """The folder of the outermost package that a file is in, below the project's root where
        there is such; None where it is in none.
        """
        found = None
        for folder in path.parents:
            at_root = folder == self._config.root and found is not None
            if at_root or not (folder / "__init__.py").exists():
                break
            found = folder
        return found

    # -- what is in it -------------------------------------------------------------------------

    def _module(self, path: Path, names: set[str]) -> Rewritten | None:
        """The module as it is to be; None where it is so already."""
        if not path.exists():
            if path.with_suffix("").is_dir():
                raise self._taken(path.with_suffix(""))
            return self._rewritten(path, "", text_of(names))
        text = self._text(path)
        there = read(text)
        if there is None:
            raise self._taken(path)
        if there.edited:
            self._leave(path, there, names)
            return None
        new = text_of(names | there.names)
        return None if same(new, there) else self._rewritten(path, text, new)

    def _taken(self, path: Path) -> UnsupportedOptionError:
        name = self._config.vendored
        return UnsupportedOptionError(
            f"{path} is there already, and is not megapg's. Give the module that takes megapg's "
            f'place another name: --runtime vendored:my_{name}, or runtime = "vendored:my_{name}" '
            "in [tool.megapg]."
        )

    def _leave(self, path: Path, there: Written, names: set[str]) -> None:
        lacking = sorted(names - there.names)
        if lacking:
            raise UnsupportedOptionError(
                f"{path} was edited, and lacks {', '.join(lacking)}, which the rewritten files "
                "need. Move it aside, and put your changes into the new one."
            )
        self.problems.append(
            Problem(self._name(path), 0, "was edited since megapg wrote it, and is left as it is")
        )

    def _rewritten(self, path: Path, text: str, new: str) -> Rewritten:
        before = path.read_bytes() if path.exists() else b""
        return Rewritten(
            file=self._name(path),
            path=path,
            before=before,
            after=new.encode(),
            text=text,
            edits=tuple(_edits(text, new)),
            is_runtime=True,
            is_new=not path.exists(),
        )

    def _text(self, path: Path) -> str:
        try:
            return path.read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            return ""

    def _name(self, path: Path) -> str:
        root = self._config.root
        return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def _edits(old: str, new: str) -> Iterator[Edit]:
    """The edits that make one text of another, by lines."""
    lines, others = old.splitlines(keepends=True), new.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    for tag, begin, end, first, last in difflib.SequenceMatcher(None, lines, others).get_opcodes():
        if tag != "equal":
            yield Edit(starts[begin], starts[end], "".join(others[first:last]), "text")
