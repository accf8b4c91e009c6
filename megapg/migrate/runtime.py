"""The imports of rewritten files: megapg, or with ``--runtime vendored`` a module of their package.

A file imports the module of its outermost package as it imports others of that package: by name,
or relatively. A script takes the module of a package that it imports, or in the project's root a
module next to it.

The vendored module holds copies of the functions that are used. The bodies of getters come
from ``megapg/megatron/getters``, the rest from ``megapg/megatron/vendored``. Its first line has a
checksum of the rest, which shows later edits. Formatters keep the checksum.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files as resources
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.migrate.config import Config
from megapg.migrate.migration import Rewritten

_FIRST_LINE = "# megapg migrate --runtime vendored wrote this, and writes it anew. "
# In the order of the copies; the first has the module's docstring.
_TEMPLATES = (
    "vendored/process_groups.py",
    "vendored/asking_passed.py",
    "getters/asks.py",
    "getters/groups.py",
    "getters/stages.py",
    "getters/before_014.py",
    "getters/initialised.py",
)
_ALWAYS = ("ProcessGroupCollection", "resolve")
# How the templates ask the globals of Megatron-core -> the same for another module.
_ASKS_CORE = {
    'import_module("megatron.core").parallel_state': 'import_module("{}")',
    "megatron.core.parallel_state": "{}",
    '"megatron.core" in sys.modules': '"{}" in sys.modules',
    "those of Megatron-core's globals": "those of {}",
    "Megatron-core's globals": "The module {}",
}
_LAYOUT = re.compile(r"[\s(),'\"]+")  # characters that formatters add, remove or exchange
_RELATIVE = re.compile(rb"^[ \t]*from[ \t]+\.", re.MULTILINE)
_IMPORTED = re.compile(rb"^[ \t]*(?:from|import)[ \t]+(\w+)", re.MULTILINE)


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
        globals_module: the module that a vendored module asks in place of ``parallel_state``.
    """

    def __init__(self, config: Config, files: Sequence[Path], globals_module: str = "") -> None:
        self._config, self._files, self._globals = config, files, globals_module

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
        name, needed = self._config.vendored.rpartition(".")[2], defaultdict[Path, set[str]](set)
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
            package, dot, name = self._config.vendored.rpartition(".")
            other = f"vendored:{package}{dot}my_{name}"
            raise UnsupportedOptionError(
                f"{path if exists else path.with_suffix('')} exists and is not megapg's. Choose "
                f"another name: --runtime {other}, or in [tool.megapg] "
                f'runtime = "{other}".'
            )
        if there is not None and there.is_edited:
            if missing := sorted(names - there.names):
                raise UnsupportedOptionError(
                    f"{path} was edited, and lacks {', '.join(missing)}. Rename it, run megapg "
                    "migrate again, and copy your edits into the new file."
                )
            return None
        text = text_of(names | there.names if there else names, self._globals)
        if there and there.checksum == _checksum(text.partition("\n")[2]):
            return None
        root = self._config.root
        file = (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()
        return Rewritten(file, path, self._text(path), text.encode(), not exists, is_runtime=True)

    # -- the place of the module -------------------------------------------------------------------

    @cache  # noqa: B019 (as long-lived as the command)
    def _home(self, path: Path) -> tuple[Path, str, str]:
        """The file of the module that a file uses, and how to import it: a module and a member."""
        package, _, name = self._config.vendored.rpartition(".")
        if package:
            return self._named_folder(package) / f"{name}.py", package, name
        text, own = self._text(path), self._package(path)
        imported = [first.decode() for first in _IMPORTED.findall(text)]
        is_module = (path.parent / "__init__.py").exists() and b"__main__" not in text
        if own is not None and own.name in imported:
            return own / f"{name}.py", own.name, name
        if own is not None and (is_module or _RELATIVE.search(text)):
            dots = "." * (len(path.parent.parts) - len(own.parts) + 1)
            return own / f"{name}.py", dots, name
        for first in imported:
            if first in self._packages:
                return self._packages[first] / f"{name}.py", first, name
        if path.parent == self._config.root:
            return path.parent / f"{name}.py", name, ""
        raise UnsupportedOptionError(
            f"{path} imports no package of the project, and may be a script. Name a package that "
            f"it can import, to hold the module: --runtime vendored:PACKAGE.{name}"
        )

    def _package(self, path: Path) -> Path | None:
        """The outermost package around a file. Folders without ``__init__.py`` may lie in it.

        The project's root counts only if there is no other.
        """
        found = None
        for folder in path.parents:
            is_regular = (folder / "__init__.py").exists()
            if found is not None and (folder == self._config.root or not is_regular):
                break
            found = folder if is_regular else None
            if folder == self._config.root:
                break
        return found

    @cached_property
    def _packages(self) -> dict[str, Path]:
        """The packages of the project, by name. A name of several packages is left out."""
        found = defaultdict[str, set[Path]](set)
        for package in filter(None, map(self._package, self._files)):
            found[package.name].add(package)
        return {name: folders.pop() for name, folders in found.items() if len(folders) == 1}

    def _named_folder(self, package: str) -> Path:
        """The folder of a package that the user names, below the root or its ``src``."""
        root = self._config.root
        for start in (root, root / "src"):
            folder = start.joinpath(*package.split("."))
            if folder.is_dir():
                return folder
        raise UnsupportedOptionError(f"--runtime: there is no package {package} in {root}.")

    @cache  # noqa: B019
    def _text(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError:
            return b""


# -- the text of the module ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Definition:
    """A definition in a template, with the comment above it."""

    name: str
    uses: frozenset[str]  # names in it
    text: str
    is_constant: bool

    def followed_by(self, other: _Definition) -> _Definition:
        """Return both as one."""
        uses, text = self.uses | other.uses, f"{self.text}\n\n\n{other.text}"
        return _Definition(self.name, uses, text, self.is_constant)


@dataclass(frozen=True)
class _Written:
    """A vendored module on disk."""

    is_edited: bool
    checksum: str  # of the text that megapg wrote
    names: frozenset[str]  # of its functions and classes


def text_of(names: Collection[str], globals_module: str = "") -> str:
    """Return the text of a vendored module that has the functions of these names.

    Args:
        names: of the functions.
        globals_module: the module that it asks in place of ``megatron.core.parallel_state``.
    """
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
    if globals_module:
        for old, new in _ASKS_CORE.items():
            body = body.replace(old, new.format(globals_module))
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
        text = resources("megapg").joinpath("megatron", name).read_text("utf-8")
        tree = ast.parse(text)
        docstring = docstring or ast.get_docstring(tree, clean=False) or ""
        for node in tree.body[1:]:
            if isinstance(node, ast.Import):
                imports |= {alias.name: "" for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                if not (node.module or "").startswith("megapg."):
                    imports |= {alias.name: node.module or "" for alias in node.names}
            elif not isinstance(node, ast.AnnAssign):
                found = _definition(node, text.split("\n"), is_getter=name.startswith("getters"))
                before = definitions.get(found.name)  # an overload
                definitions[found.name] = found if before is None else before.followed_by(found)
    return docstring, imports, definitions


def _definition(node: ast.stmt, lines: list[str], is_getter: bool) -> _Definition:
    """A function, a class or a constant. A getter keeps one line of its docstring."""
    first = node.lineno - 1
    while lines[first - 1].startswith(("#", "@")):
        first -= 1
    own = lines[first : node.end_lineno]
    if is_getter and isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        summary = [f'    """{said.splitlines()[0]}"""']
        own = lines[first : docstring.lineno - 1] + summary
        own += lines[docstring.end_lineno : node.end_lineno]
    uses = frozenset(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
    uses |= {name for types in _types(node) for name in re.findall(r"\w+", types)}
    text = "\n".join(own)
    if isinstance(node, ast.Assign):
        return _Definition(ast.unparse(node.targets[0]), uses, text, is_constant=True)
    return _Definition(getattr(node, "name", ""), uses, text, is_constant=False)


def _types(node: ast.stmt) -> Iterator[str]:
    """The types that are written as text, in calls of ``cast`` and ``TypeVar``."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("cast", "TypeVar"):
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            constants = [each.value for each in values if isinstance(each, ast.Constant)]
            yield from (each for each in constants if isinstance(each, str))


def _import_lines(imports: Mapping[str, str], used: Collection[str]) -> str:
    """The imports of the names that are used, sorted."""
    members: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*imports} & {*used} - {"annotations"}):
        members[imports[name]].append(name)
    lines = [f"import {name}" for name in members.pop("", [])]
    lines += [f"from {module} import {', '.join(members[module])}" for module in sorted(members)]
    return "from __future__ import annotations\n\n" + "".join(f"{line}\n" for line in lines)
