"""The imports of rewritten files: megapg, or with ``--runtime vendored`` a module of their package.

The vendored module holds copies of the functions that are used, from ``megapg/megatron/vendored``.
Its first line has a checksum of the rest, which shows later edits. Formatters keep the checksum.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files as resources
from itertools import pairwise
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.config import Config
from megapg.migrate.migration import Rewritten

_FIRST_LINE = "# megapg migrate --runtime vendored wrote this, and writes it anew. "
_TEMPLATES = ("process_groups.py", "more_getters.py")  # the first has the module's docstring
_ALWAYS = ("ProcessGroupCollection", "resolve")
_LAYOUT = re.compile(r"[\s(),'\"]+")  # characters that formatters add, remove or exchange
# The dots, the module and the first name of ``from ..a.b import c``; the module of ``import a.b``.
_IMPORT = re.compile(
    rb"^(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+\(?[ \t]*(\w*)|import[ \t]+([\w.]+))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Runtime:
    """The imports of a rewritten file: ``from MODULE import MEMBER``, or ``import MODULE``."""

    module: str  # has resolve() and groups_of(); dots in front if it is relative
    member: str  # empty for ``import MODULE``
    name: str  # in calls, unless the file uses the name for something else
    getters_module: str
    getters_member: str
    getters_name: str


MEGAPG = Runtime("megapg", "", "megapg", "megapg.megatron", "getters", "getters")


class Runtimes:
    """The runtime of each file of a project.

    Args:
        config: the settings of the run.
        files: the Python files of the project.
    """

    def __init__(self, config: Config, files: Sequence[Path]) -> None:
        self._config, self._files = config, files
        self._texts: dict[Path, bytes] = {}
        self._homes: dict[Path, tuple[Path, str, str]] = {}

    def of(self, path: Path) -> Runtime:
        """Return what a file imports."""
        if not self._config.vendored:
            return MEGAPG
        _, module, member = self._home(path)
        return Runtime(module, member, member or module, module, member, member or module)

    def modules(self, calls: Mapping[Path, Collection[str]]) -> list[Rewritten]:
        """Return the vendored modules that have to be written.

        Args:
            calls: by rewritten file, the names of the functions that its new text calls on the
                vendored module. Other names are ignored.

        Raises:
            UnsupportedOptionError: if another file has the module's name, or if the module was
                edited and lacks a function.
        """
        name, needed = self._config.vendored, defaultdict[Path, set[str]](set)
        if name:
            for path in self._files:  # those of an earlier run, which megapg may have changed since
                if path.stem == name and _read(self._text(path).decode(errors="replace")):
                    needed[path] = set()
            for path, names in calls.items():
                if known := _templates()[2].keys() & {*names}:
                    needed[self._home(path)[0]] |= known
        modules = (self._module(path, names) for path, names in sorted(needed.items()))
        return [module for module in modules if module is not None]

    def _module(self, path: Path, names: set[str]) -> Rewritten | None:
        """The new text of a module; None if it stays."""
        exists = path.exists()
        there = _read(self._text(path).decode(errors="replace")) if exists else None
        if there is None and (exists or path.with_suffix("").is_dir()):
            raise UnsupportedOptionError(
                f"{path if exists else path.with_suffix('')} exists and is not megapg's. Choose "
                f"another name: --runtime vendored:my_{path.stem}, or in [tool.megapg] "
                f'runtime = "vendored:my_{path.stem}".'
            )
        if there is not None and there.is_edited:
            if missing := sorted(names - there.names):
                raise UnsupportedOptionError(
                    f"{path} was edited, and lacks {', '.join(missing)}. Rename it, run megapg "
                    "migrate again, and copy your edits into the new file."
                )
            return None
        text = text_of(names | there.names if there else names)
        if there and there.checksum == _checksum(text.partition("\n")[2]):
            return None
        root = self._config.root
        file = (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()
        return Rewritten(file, path, self._text(path), text.encode(), not exists, is_runtime=True)

    # -- the place of the module -------------------------------------------------------------------

    def _home(self, path: Path) -> tuple[Path, str, str]:
        """The file of the module that a file uses, and how to import it: a module and a member."""
        if path not in self._homes:
            self._homes[path] = self._find_home(path)
        return self._homes[path]

    def _find_home(self, path: Path) -> tuple[Path, str, str]:
        name, package = self._config.vendored, self._package(path)
        top = self._top(path, package)
        if top is not None:
            home = package if package is not None and top in package.parents else top
            module = ".".join(home.parts[len(top.parts) - 1 :])
            return home / f"{name}.py", module, name
        if package is None:
            return path.parent / f"{name}.py", name, ""
        dots = "." * (len(path.parent.parts) - len(package.parts) + 1)
        return package / f"{name}.py", dots, name

    def _package(self, path: Path) -> Path | None:
        """The outermost package of a file, below the project's root; None for a script.

        A folder without ``__init__.py`` is a package if imports go through it. The vendored module
        goes there only if there is no other package.
        """
        regular = found = None
        for folder in () if self._is_script(path) else path.parents:
            is_regular = (folder / "__init__.py").exists()
            is_root = folder == self._config.root and found is not None
            if is_root or not (is_regular or folder in self._imported):
                break
            found, regular = folder, folder if is_regular else regular
        return regular or found

    def _is_script(self, path: Path) -> bool:
        """True for a file of a folder without ``__init__.py`` that is not imported.

        It runs as ``__main__``, or lies in a folder whose files import each other as scripts do.
        """
        is_relative = any(level for level, *_ in self._imports(path))
        if is_relative or path in self._imported or (path.parent / "__init__.py").exists():
            return False
        return path.parent in self._of_scripts or b"__main__" in self._text(path)

    @cached_property
    def _of_scripts(self) -> set[Path]:
        """The folders with a file that imports a module of its folder by its bare name."""
        return {
            path.parent
            for path in self._files
            for level, module, _ in self._imports(path)
            if not level and len(module) == 1 and (path.parent / f"{module[0]}.py").exists()
        }

    def _top(self, path: Path, package: Path | None) -> Path | None:
        """The folder whose name begins absolute imports in a file; None if it has no such imports.

        The file's own imports count first. A script may import a package that is not around it.
        Last come the imports of this file, or of its package, in other files.
        """
        if own := self._tops_of(path):
            return own[0]
        if not any(level for level, *_ in self._imports(path)):
            for first, *rest in self._absolute(path):
                for top in self._tops:
                    if top.name == first and _holds(top, rest):
                        return top
        around = [folder for folder in path.parents if folder in self._tops and package is not None]
        return max(around, key=lambda each: (self._tops[each], -len(each.parts)), default=None)

    @cached_property
    def _tops(self) -> Counter[Path]:
        """The folders that begin absolute imports in files below them, and the number of files."""
        return Counter(top for path in self._files for top in self._tops_of(path))

    @cached_property
    def _imported(self) -> set[Path]:
        """The folders of the project that imports go through, and the modules in them."""
        found: set[Path] = set()
        names = {folder.name for path in self._files for folder in path.parents}
        for path in self._files:
            inside = [each for each in path.parents if each.is_relative_to(self._config.root)]
            for level, module, member in self._imports(path):
                parts = [*module, *member]
                if level:
                    found |= {*path.parents[:level]}
                    found |= {path.parents[level - 1] / f"{each}.py" for each in parts[:1]}
                for start in path.parents[level - 1 : level] if level else inside:
                    found |= _on_the_way(start, parts) if {*parts[:1]} & names else set()
        return found

    def _tops_of(self, path: Path) -> list[Path]:
        found = [
            folder
            for first, *rest in self._absolute(path)
            for folder in path.parents
            if folder.name == first and _holds(folder, rest)
        ]
        return list(dict.fromkeys(found))

    def _imports(self, path: Path) -> Iterator[tuple[int, list[str], list[str]]]:
        """The imports of a file: leading dots, and the parts of the module and of a name in it."""
        for dots, module, member, imported in _IMPORT.findall(self._text(path)):
            parts = (module or imported).decode().split(".") if module or imported else []
            yield len(dots), parts, [member.decode()] if member else []

    def _absolute(self, path: Path) -> Iterator[list[str]]:
        return (parts for level, parts, _ in self._imports(path) if not level and len(parts) > 1)

    def _text(self, path: Path) -> bytes:
        if path not in self._texts:
            try:
                self._texts[path] = path.read_bytes()
            except OSError:
                self._texts[path] = b""
        return self._texts[path]


def _on_the_way(folder: Path, parts: Sequence[str]) -> set[Path]:
    """Return the folders that a dotted name goes through from a folder, and its modules."""
    found: set[Path] = set()
    for each, following in pairwise(parts):
        folder /= each
        if not _holds(folder, [following]):
            break
        found |= {folder, folder / f"{following}.py"}
    return found


def _holds(folder: Path, names: Sequence[str]) -> bool:
    """True if a folder has the first of the names as a module or a folder."""
    inside = Path(folder, *names[:1])
    return inside.is_dir() or inside.with_suffix(".py").exists()


# -- the text of the module ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Definition:
    """A definition in a template, with the comment above it."""

    name: str
    uses: frozenset[str]  # names in it
    text: str
    is_constant: bool


@dataclass(frozen=True)
class _Written:
    """A vendored module on disk."""

    is_edited: bool
    checksum: str  # of the text that megapg wrote
    names: frozenset[str]  # of its functions and classes


def text_of(names: Collection[str]) -> str:
    """Return the text of a vendored module that has the functions of these names."""
    docstring, imports, definitions = _templates()
    waiting, used = [*_ALWAYS, *names], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in used:
            used.add(name)
            if name in definitions:
                waiting += definitions[name].uses
    body = f'"""{docstring}"""\n\n{_import_lines(imports, used)}'
    follows_block = False
    for each in definitions.values():
        if each.name in used:
            gap = "\n" if each.is_constant and not follows_block else "\n\n"
            body += f"{gap}{each.text}\n"
            follows_block = not each.is_constant
    return f"{_FIRST_LINE}{_checksum(body)}\n{body}"


def _read(text: str) -> _Written | None:
    """What a file holds; None if megapg did not write it."""
    first, _, body = text.partition("\n")
    if not first.startswith(_FIRST_LINE):
        return None
    checksum = first.removeprefix(_FIRST_LINE).strip()
    names = re.findall(r"^(?:def|class) (\w+)", body, re.MULTILINE)
    return _Written(_checksum(body) != checksum, checksum, frozenset(names))


def _checksum(body: str) -> str:
    return hashlib.sha256(_LAYOUT.sub("", body).encode()).hexdigest()[:16]


@cache
def _templates() -> tuple[str, Mapping[str, str], Mapping[str, _Definition]]:
    """The docstring, the module of each imported name (empty for a module), and definitions."""
    docstring = ""
    imports: dict[str, str] = {}
    definitions: dict[str, _Definition] = {}
    for name in _TEMPLATES:
        text = resources("megapg").joinpath("megatron", "vendored", name).read_text("utf-8")
        tree = ast.parse(text)
        docstring = docstring or ast.get_docstring(tree, clean=False) or ""
        for node in tree.body[1:]:
            if isinstance(node, ast.Import):
                imports |= {alias.name: "" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                if not (node.module or "").startswith("megapg."):
                    imports |= {alias.name: node.module or "" for alias in node.names}
            else:
                found = _definition(node, text.split("\n"))
                definitions[found.name] = found
    return docstring, imports, definitions


def _definition(node: ast.stmt, lines: list[str]) -> _Definition:
    """A function, a class or the assignment of a constant."""
    first = node.lineno - 1
    while lines[first - 1].startswith(("#", "@")):
        first -= 1
    uses = frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
    text = "\n".join(lines[first : node.end_lineno])
    if isinstance(node, ast.Assign):
        return _Definition(ast.unparse(node.targets[0]), uses, text, is_constant=True)
    return _Definition(getattr(node, "name", ""), uses, text, is_constant=False)


def _import_lines(imports: Mapping[str, str], used: Collection[str]) -> str:
    """The imports of the names that are used, sorted."""
    members: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*imports} & {*used} - {"annotations"}):
        members[imports[name]].append(name)
    lines = [f"import {name}" for name in members.pop("", [])]
    lines += [f"from {module} import {', '.join(members[module])}" for module in sorted(members)]
    return "from __future__ import annotations\n\n" + "".join(f"{line}\n" for line in lines)
