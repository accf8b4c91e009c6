"""What a migration comes to: which uses are served, and from where; which are left; the files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megapg.migrate.sites import Site
from megapg.migrate.source import Problem


class Style(StrEnum):
    """What functions are given: their one group, or a collection."""

    NARROW = "narrow"
    COLLECTION = "collection"
    AUTO = "auto"


class How(StrEnum):
    """From what a use is served after the migration, the best first."""

    GROUP = "group"  # a group that was in scope
    COLLECTION = "collection"  # a collection that was in scope
    MODEL = "model"  # what a model carries: megapg.groups_of(model)
    THREADED = "threaded"  # a parameter that every caller passes
    FAKE = "fake"  # a fake collection, where a test patched getters
    RESOLVED = "resolved"  # megapg.resolve(): what was passed, else the globals


SHIMS = frozenset({How.RESOLVED})
"""Those that may end at the globals because nobody passed anything."""


@dataclass(frozen=True)
class Served:
    """A use that is rewritten.

    Attributes:
        site: what is there before the migration.
        how: from what it is served.
        text: what is written in place of ``site.text``.
    """

    site: Site
    how: How
    text: str


@dataclass(frozen=True)
class Left:
    """A use that stays as it is.

    Attributes:
        site: what is there.
        reason: code of why, for ``megapg explain``.
        detail: what is special about this one; may be empty.
        suggestion: what to write by hand; may be empty.
    """

    site: Site
    reason: str
    detail: str = ""
    suggestion: str = ""


@dataclass(frozen=True)
class Edit:
    """One change of a file: ``text[start:stop]`` becomes ``new``.

    Attributes:
        start: index of the first character in the old text.
        stop: index behind the last one.
        new: what is there instead.
        what: ``site``, which may be of a function that ``functools.partial`` of it replaces;
            ``parameter``, ``argument``, ``statement``, ``import``, or ``patch`` for whole lines of
            a test that patched getters.
    """

    start: int
    stop: int
    new: str
    what: str


def applied(text: str, edits: Iterable[Edit]) -> str:
    """A text with edits that don't overlap; insertions at one place stay in their order."""
    pieces, at = [], 0
    for edit in sorted(edits, key=lambda each: (each.start, each.stop)):
        pieces += [text[at : edit.start], edit.new]
        at = edit.stop
    return "".join([*pieces, text[at:]])


@dataclass(frozen=True)
class Rewritten:
    """A file with edits that passed verification.

    Attributes:
        file: its name in reports.
        path: where it is.
        before: its bytes now.
        after: its bytes when written.
        text: the text before, which the edits are about.
        edits: in the order of the file, without overlaps.
        requires: names of files without whose new text this one would not work: it passes what
            functions there only take then.
    """

    file: str
    path: Path
    before: bytes
    after: bytes
    text: str
    edits: tuple[Edit, ...]
    requires: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Root:
    """A place where the globals are turned to because nobody passed a collection.

    Attributes:
        file: the file.
        function: qualified name of the function; empty at module level.
        fields: what it needs.
        serves: how many of its own uses end there.
    """

    file: str
    function: str
    fields: tuple[str, ...]
    serves: int


@dataclass(frozen=True)
class Migration:
    """The whole of it. Nothing is written yet.

    Attributes:
        served: uses that are rewritten, by file and position.
        left: uses that stay, by file and position; those with ``# megapg: keep`` are in neither.
        kept: how many uses have ``# megapg: keep``.
        files: the files that change, by name.
        roots: where the globals are still turned to.
        problems: files that could not be looked into, and such whose rewrite failed verification
            (those are untouched and their uses are in ``left`` with the reason ``unverified``).
        looked_at: how many files there are.
    """

    served: Sequence[Served]
    left: Sequence[Left]
    kept: int
    files: Sequence[Rewritten]
    roots: Sequence[Root]
    problems: Sequence[Problem]
    looked_at: int
