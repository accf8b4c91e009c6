"""The order of a file's imports: as the project's sorter has it, else as the file shows it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from megapg.migrate.python.methods import kept

STANDARD_LIBRARY, THIRD_PARTY, FIRST_PARTY = "standard-library", "third-party", "first-party"
FUTURE, LOCAL_FOLDER = "future", "local-folder"
SECTIONS = (FUTURE, STANDARD_LIBRARY, THIRD_PARTY, FIRST_PARTY, LOCAL_FOLDER)


@dataclass(frozen=True)
class Order:
    """How imports are sorted; by default as isort and ruff do it."""

    sections: tuple[str, ...] = SECTIONS  # from the top
    known: tuple[tuple[str, str], ...] = ()  # patterns of modules, and the section of each
    default: str = THIRD_PARTY  # the section of what is none of the others
    roots: tuple[Path, ...] = ()  # where the modules of the project are
    from_first: bool = False  # `from x import` before `import x`
    mixed: bool = False  # both kinds together, by the module alone
    between_kinds: int = 0  # blank lines
    case_sensitive: bool = False
    joined: int = 0  # the width up to which the names of an import are on one line; 0 as they are

    def section(self, module: str) -> int:
        """The place of a module's section; a relative one begins with a dot."""
        name = self._section(module)
        return self.sections.index(name) if name in self.sections else len(self.sections)

    @kept
    def _section(self, module: str) -> str:
        if module.startswith("."):
            return LOCAL_FOLDER
        if module == "__future__":
            return FUTURE
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            for pattern, section in self.known:
                if fnmatchcase(".".join(parts[:length]), pattern):
                    return section
        if parts[0] in sys.stdlib_module_names:
            return STANDARD_LIBRARY
        places = [root / parts[0] for root in self.roots]
        if any(each.is_dir() or each.with_suffix(".py").is_file() for each in places):
            return FIRST_PARTY
        return self.default

    def key(self, statement: ast.Import | ast.ImportFrom) -> tuple[object, ...]:
        """What the statements of a file are sorted by."""
        module = module_of(statement)
        is_from = isinstance(statement, ast.ImportFrom)
        kind = 0 if self.mixed else int(is_from != self.from_first)
        return self.section(module), kind, _natural(module, self.case_sensitive)

    def blank_lines(self, one: ast.stmt, other: ast.stmt) -> int:
        """How many are between two imports of which one follows the other."""
        if not isinstance(one, _Import) or not isinstance(other, _Import):
            return 1
        if self.section(module_of(one)) != self.section(module_of(other)):
            return 1
        alike = self.mixed or type(one) is type(other)
        return 0 if alike else self.between_kinds

    def is_shown_by(self, leading: Sequence[ast.stmt]) -> bool:
        """Whether imports are in this order, with blank lines between their sections, and have at
        least two of them.
        """
        imports = [each for each in leading if isinstance(each, _Import)]
        keys = [self.key(each) for each in imports]
        pairs = list(pairwise(imports))
        return (
            len({key[0] for key in keys if key[0]}) > 1
            and keys == sorted(keys)
            and all(
                self.blank_lines(one, other) == (other.lineno - (one.end_lineno or 0) > 1)
                for one, other in pairs
            )
        )


_Import = ast.Import | ast.ImportFrom


def module_of(statement: ast.Import | ast.ImportFrom) -> str:
    """The module that is imported, or imported from, the first of several; with its dots."""
    if isinstance(statement, ast.ImportFrom):
        return "." * statement.level + (statement.module or "")
    return statement.names[0].name


def _natural(name: str, case_sensitive: bool) -> tuple[tuple[str, int], ...]:
    """A key by which numbers in names are compared as numbers."""
    parts = re.split(r"(\d+)", name if case_sensitive else name.lower())
    return tuple((part, 0) if i % 2 == 0 else ("", int(part)) for i, part in enumerate(parts))


@dataclass(frozen=True)
class Placed:
    """A stretch between two imports that stay, with what goes and what comes there."""

    before: ast.stmt | None  # the import above; None at the top
    behind: ast.stmt | None  # the import below; None at the end
    gone: tuple[ast.stmt, ...]
    come: tuple[ast.stmt, ...]


def placed(
    leading: Sequence[ast.stmt],
    gone: Collection[ast.stmt],
    new: Sequence[ast.Import | ast.ImportFrom],
    order: Order,
) -> list[Placed]:
    """Where new imports go among those of a file, each stretch that changes.

    Args:
        leading: those of the file, in its order.
        gone: those of them that go.
        new: those that come.
        order: how they are sorted.
    """
    line: list[ast.stmt] = list(leading)
    for each in new:
        line.insert(_index(line, each, order), each)
    found: list[Placed] = []
    before: ast.stmt | None = None
    some: list[ast.stmt] = []
    for at in (*line, None):
        if at is not None and (at in gone or at not in leading):
            some.append(at)
            continue
        if some:
            come = tuple(each for each in some if each not in gone)
            went = tuple(each for each in some if each in gone)
            found.append(Placed(before, at, went, come))
        before, some = at, []
    return found


def _index(line: Sequence[ast.stmt], new: ast.Import | ast.ImportFrom, order: Order) -> int:
    """Where a new import goes: behind the last one that comes before it; in a file that is not
    sorted, of those in its own section, if there are any.
    """
    key = order.key(new)
    keys = [order.key(each) if isinstance(each, _Import) else () for each in line]
    same = [i for i, each in enumerate(keys) if each[:1] == key[:1]]
    if same:
        before = [i for i in same if keys[i] <= key]
        return before[-1] + 1 if before else same[0]
    before = [i for i, each in enumerate(keys) if each and each < key]
    return before[-1] + 1 if before else 0
