"""The result of a run: rewritten uses, uses that are left, and the new files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from megapg.migrate.uses import Use


class How(StrEnum):
    """Where a rewritten use takes its groups from, the best first."""

    COLLECTION = "collection"  # a collection or a group that the code already had
    MODEL = "model"  # a model: megapg.groups_of(model)
    THREADED = "threaded"  # the new parameter, and every call passes it
    RESOLVED = "resolved"  # megapg.resolve(): the new parameter, or the globals if it is None


@dataclass(frozen=True)
class Problem:
    """A file that cannot be read, rewritten or written."""

    file: str  # path relative to the project's root
    line: int  # 0 if the problem has no line
    message: str  # continues the file's name: "can't be read: ..."


@dataclass(frozen=True)
class OwnGroups:
    """A module that defines getters, and asks no other module for its groups.

    Attributes:
        file: name of the file in reports.
        module: its dotted name.
        wrapper: the name for ``--wrapper``: that of its package, if the package has the getters.
        getters: names of the getters of groups.
    """

    file: str
    module: str
    wrapper: str
    getters: Sequence[str]


@dataclass(frozen=True)
class Found:
    """All uses in a project."""

    uses: Sequence[Use]  # by file and position
    files: Collection[str]  # names of the Python files that were looked at
    notebooks: int  # notebooks, which are not read
    problems: Sequence[Problem]
    skipped: Mapping[str, int] = field(default_factory=dict)  # folders -> Python files in them
    own_groups: Sequence[OwnGroups] = ()  # modules that no setting names, and whose groups differ


@dataclass(frozen=True)
class Served:
    """A use that is rewritten."""

    use: Use
    how: How
    text: str  # the new expression


@dataclass(frozen=True)
class Left:
    """A use that stays."""

    use: Use
    reason: str  # a code of :data:`megapg.migrate.reasons.REASONS`
    detail: str = ""


@dataclass(frozen=True)
class Root:
    """A function that reads the globals because a caller passes no collection."""

    file: str
    line: int  # of its ``def``; 0 at module level
    function: str  # qualified name, of a constructor that of its class; empty at module level
    takes: bool  # True if it has the parameter ``pg_collection``
    uses: int  # rewritten uses in it and in the functions that it passes its collection to
    calls: tuple[str, ...]  # ``file:line`` of the calls that pass nothing


@dataclass(frozen=True)
class Rewritten:
    """A file and its new text."""

    file: str
    path: Path
    before: bytes  # empty for a new file
    after: bytes
    is_new: bool = False
    is_runtime: bool = False  # True for the module that ``--runtime vendored`` writes


@dataclass(frozen=True)
class Migration:
    """The result of a run. Nothing is written to disk yet."""

    found: Found
    served: Sequence[Served]  # by file and position
    left: Sequence[Left]  # by file and position; uses with "# megapg: keep" are in neither
    files: Sequence[Rewritten]  # by name
    roots: Sequence[Root]  # those with most uses first
    problems: Sequence[Problem]  # those of ``found``, and files that can't be rewritten
    # Formatters that are configured but not installed -> number of files.
    unformatted: Mapping[str, int] = field(default_factory=dict)
