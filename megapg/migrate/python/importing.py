"""What an import of a module runs, replayed from syntax trees: nothing is imported.

A module is unfinished while its statements run. Who imports a name from an unfinished module that
has not bound it yet fails.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from megapg.migrate.python.flow import blocks
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import FunctionNode, last_name
from megapg.migrate.python.tree import Modules, relative_parts
from megapg.migrate.python.unused import FOR_TYPES, Import, notices_imports

_ANY = "*"  # as a name that a module has: it may have all
_EVERY = (_ANY, "__getattr__")


class Failed(NamedTuple):
    """An import of a name that an unfinished module has not bound yet."""

    by: Path  # who imports it
    of: Path  # the module
    name: str  # the name


class Taken(NamedTuple):
    """A name that an import takes from a module."""

    name: str  # empty where it is certain to be there
    module: Path | None  # the file of the submodule that may be meant
    bound: str  # what it is called from then on


@dataclass(frozen=True)
class Imports:
    """An import statement, or one name of it."""

    runs: tuple[Path, ...]  # the files of the module and of the packages around, outermost first
    of: Path | None  # the module's file; None where names are taken of none that is known
    names: tuple[Taken, ...]
    outside: str = ""  # the first word of a module that is none of the project


@dataclass(frozen=True)
class Tries:
    """A ``try`` that goes on where an import in it fails."""

    body: Steps
    otherwise: Steps  # its handlers
    behind: Steps  # what runs where nothing fails, and in the end


Steps: TypeAlias = "tuple[str | Imports | Tries, ...]"
"""What a module does at its top level, in order: a string is a name that it binds."""


class Reader:
    """Reads what modules do at their top level, from their syntax trees.

    Args:
        modules: the project's files.
        made: the name of modules that are there once what is read is.

    Attributes:
        modules: these files.
        tried: how often each module of others is imported where that may fail.
        wanted: how often where it may not.
    """

    def __init__(self, modules: Modules, made: str = "") -> None:
        self.modules, self._made = modules, made
        self.tried: Counter[str] = Counter()
        self.wanted: Counter[str] = Counter()

    def steps(self, tree: ast.Module, path: Path) -> Steps:
        """What a module does."""
        return tuple(self._steps(tree.body, path, tried=False))

    def _steps(
        self, body: Sequence[ast.stmt], path: Path, *, tried: bool
    ) -> Iterator[str | Imports | Tries]:
        for each in body:
            if isinstance(each, Import):
                for one in self.imports(each, path):
                    if one.outside:
                        (self.tried if tried else self.wanted)[one.outside] += 1
                    yield one
            elif isinstance(each, FunctionNode):
                yield each.name
            elif isinstance(each, ast.ClassDef):
                for step in self._steps(each.body, path, tried=tried):
                    if isinstance(step, Imports | Tries):
                        yield step
                yield each.name
            elif isinstance(each, ast.Try) and notices_imports(each):
                behind = [*each.orelse, *each.finalbody]
                yield Tries(
                    tuple(self._steps(each.body, path, tried=True)),
                    tuple(
                        step
                        for handler in each.handlers
                        for step in self._steps(handler.body, path, tried=tried)
                    ),
                    tuple(self._steps(behind, path, tried=tried)),
                )
            else:
                yield from _names_bound(each)
                for block in _that_run(each):
                    yield from self._steps(block, path, tried=tried)

    def imports(self, statement: Import, path: Path) -> Iterator[Imports]:
        """What an import statement of a file runs and binds."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                dotted = tuple(alias.name.split("."))
                runs = self._found(dotted, path)
                bound = alias.asname or dotted[0]
                yield Imports(runs, None, (Taken("", None, bound),), "" if runs else dotted[0])
            return
        dotted = tuple((statement.module or "").split(".")) if statement.module else ()
        if statement.level:
            parts = relative_parts(path, statement.level, dotted)
            of = self.modules.exactly(parts)
            runs = self._around(of) if of is not None else ()
        else:
            runs = self._found(dotted, path)
            of = runs[-1] if runs else None
            parts = self.modules.parts(of) if of is not None else ()
        taken: list[Taken] = []
        more: list[Path] = []
        for alias in statement.names:
            module = self.modules.exactly((*parts, alias.name)) if parts else None
            if not parts:  # a folder without __init__
                inner = self._found((*dotted, alias.name), path)
                module = inner[-1] if inner else None
                more += inner[:-1]
            name = "" if module is None and alias.name == self._made else alias.name
            taken.append(Taken(name, module, alias.asname or alias.name))
        known = of is not None or statement.level or any(each.module for each in taken)
        yield Imports((*runs, *more), of, tuple(taken), "" if known else dotted[0])

    def _found(self, dotted: tuple[str, ...], path: Path) -> tuple[Path, ...]:
        """The files that the import of a dotted name runs; none where it is of others."""
        found = self.modules.find(dotted, path)
        return self._around(found, len(dotted)) if found is not None else ()

    def _around(self, path: Path, length: int = 0) -> tuple[Path, ...]:
        """A module's file behind those of the packages around it; of as many as a name of some
        length has.
        """
        parts = self.modules.parts(path)
        found = [path]
        for end in range(len(parts) - 1, len(parts) - length if length else 0, -1):
            package = self.modules.exactly(parts[:end])
            if package is not None and package.stem == "__init__":
                found.append(package)
            elif not length:
                break
        return tuple(reversed(found))

    @property
    def optional(self) -> frozenset[str]:
        """The modules of others that are mostly tried: they may be missing."""
        found = {each for each, times in self.tried.items() if times > self.wanted[each]}
        return frozenset(found - sys.stdlib_module_names)

    def run_for(self, path: Path) -> tuple[Path, ...]:
        """What an import of a module runs, the module itself last."""
        return self._around(path)


def _that_run(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a statement that run when a module is imported, as far as that can be told."""
    while isinstance(statement, ast.If):  # a long chain of elif is no deep one
        test, is_not = statement.test, False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, is_not = test.operand, True
        is_for_types = last_name(test) == FOR_TYPES
        is_script = isinstance(test, ast.Compare) and last_name(test.left) == "__name__"
        if not is_script and (is_not or not is_for_types):
            yield statement.body
        if is_for_types and is_not:
            return
        if len(statement.orelse) != 1 or not isinstance(statement.orelse[0], ast.If):
            yield statement.orelse
            return
        statement = statement.orelse[0]
    yield from blocks(statement)


def _names_bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds itself, which is no import and no definition."""
    targets: list[ast.AST | None] = [*getattr(statement, "targets", ())]
    targets.append(getattr(statement, "target", None))
    targets += [each.optional_vars for each in getattr(statement, "items", ())]
    targets += [each.pattern for each in getattr(statement, "cases", ())]
    if isinstance(statement, ast.AnnAssign) and statement.value is None:
        return
    for target in targets:
        for node in ast.walk(target) if target is not None else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
                yield node.name


class _Stopped(Exception):
    """An import fails, in a replay."""


class Replay:
    """Replays imports.

    Args:
        steps: what a module does at its top level.
        missing: the modules of others that are not there.

    Attributes:
        failed: the imports that failed so far.
        order: the modules that began, in that order, each once.
    """

    def __init__(self, steps: Callable[[Path], Steps], missing: frozenset[str]) -> None:
        self._steps, self._missing = steps, missing
        self._bound: dict[Path, set[str]] = {}
        self._unfinished: set[Path] = set()
        self.failed: set[Failed] = set()
        self.order: dict[Path, None] = {}

    def copy(self) -> Replay:
        """One that goes on from here, and leaves this one as it is."""
        new = Replay(self._steps, self._missing)
        new._bound = {path: set(names) for path, names in self._bound.items()}
        new.failed, new.order = set(self.failed), dict(self.order)
        return new

    def __contains__(self, path: Path) -> bool:
        return path in self._bound

    def runs(self, path: Path) -> bool:
        """Import a module whose packages are imported; whether that comes to its end."""
        try:
            self._load(path)
        except (_Stopped, RecursionError):
            return False
        return True

    def _load(self, path: Path) -> None:
        bound = self._bound[path] = set[str]()
        self.order[path] = None
        self._unfinished.add(path)
        try:
            self._run(self._steps(path), path, bound)
        except BaseException:
            del self._bound[path]
            raise
        finally:
            self._unfinished.discard(path)

    def _run(self, steps: Steps, path: Path, bound: set[str]) -> None:
        for step in steps:
            if isinstance(step, str):
                bound.add(step)
            elif isinstance(step, Imports):
                self._import(step, path, bound)
            else:
                try:
                    self._run(step.body, path, bound)
                except _Stopped:
                    self._run(step.otherwise, path, bound)
                self._run(step.behind, path, bound)

    def _import(self, step: Imports, path: Path, bound: set[str]) -> None:
        if step.outside in self._missing:
            raise _Stopped
        for each in step.runs:
            if each not in self._bound:
                self._load(each)
        of = step.of
        there = self._bound.get(of, set()) if of is not None else {_ANY}
        for taken in step.names:
            if taken.name == _ANY:
                bound |= there
                continue
            if taken.module is not None:
                if taken.name not in there and taken.module not in self._bound:
                    self._load(taken.module)
            elif taken.name and of in self._unfinished and there.isdisjoint({taken.name, *_EVERY}):
                self.failed.add(Failed(path, of, taken.name))
                raise _Stopped
            bound.add(taken.bound)


class Replays:
    """What comes of the import of each module, with the packages around it.

    Args:
        reader: knows these packages.
        steps: what a module does.
        missing: the modules of others that are not there.
    """

    def __init__(
        self, reader: Reader, steps: Callable[[Path], Steps], missing: frozenset[str]
    ) -> None:
        self._reader, self._steps = reader, steps
        self._empty = Replay(steps, missing)

    @kept
    def failed(self, path: Path) -> frozenset[Failed] | None:
        """The imports that fail when a module is imported; None where that one fails."""
        found = self.up_to(path)
        return None if found is None else frozenset(found.failed)

    def up_to(self, path: Path) -> Replay | None:
        """The replay up to a module; None where its import fails."""
        *around, last = self._reader.run_for(path)
        return self._then(tuple(around), last)

    @kept
    def _behind(self, packages: tuple[Path, ...]) -> Replay | None:
        """The replay up to a package; not of each module, for that is a lot to keep."""
        return self._then(packages[:-1], packages[-1]) if packages else self._empty

    def _then(self, packages: tuple[Path, ...], path: Path) -> Replay | None:
        found = self._behind(packages)
        if found is self._empty and path.stem != "__init__":
            found = self._behind(self._first_package(path))
            if found is None or path in found:  # it may import the module in turn
                found = self._empty
        if found is None or path in found:
            return found
        found = found.copy()
        return found if found.runs(path) else None

    def _first_package(self, path: Path) -> tuple[Path, ...]:
        """The package that a module imports first, so that it is replayed once for many."""
        for step in self._steps(path):
            if isinstance(step, Tries):
                break
            if isinstance(step, Imports) and (step.runs or not step.outside):
                return tuple(each for each in step.runs[:1] if each.stem == "__init__")
        return ()
