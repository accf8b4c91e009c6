"""What a migration comes to: which uses are served, and from where; which are left; the files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megapg.migrate.find.index import Findings
from megapg.migrate.find.sites import Site
from megapg.migrate.python.source import Problem, line_starts


class How(StrEnum):
    """From what a use is served after the migration, the best first."""

    COLLECTION = "collection"  # a collection that was in scope
    MODEL = "model"  # what a model carries: megapg.groups_of(model)
    THREADED = "threaded"  # a parameter that every caller passes
    RESOLVED = "resolved"  # megapg.resolve(): what was passed, else the globals


SHIMS = frozenset({How.RESOLVED})
"""Those that may end at the globals because nobody passed anything."""


class Why(StrEnum):
    """Why a use may end at the globals: what is so of its function, or of the last of those that
    call it, where nobody passes a collection.
    """

    # About who calls it.
    UNCALLED = "nobody calls it"
    HANDED_ON = "handed on as a value"
    MODULE_LEVEL = "asked or called at module level"
    UNSEEN = "who calls it can't be told"
    HAS_GROUPS = "called with a group, or with **kwargs"
    TOO_FAR = "too many calls from who has one"
    MAY_BE_NONE = "passed what may be None"
    # About its signature.
    LAMBDA = "a lambda"
    INSIDE = "made in a function, for a class"
    ANY_KEYWORD = "takes **kwargs"
    DECORATED = "decorated"
    BY_A_RUNNER = "called by a test runner"
    SEVERAL = "defined several times"
    NAMED_SO = "has a pg_collection of its own"
    REPLACED = "may be replaced at run time"
    INSPECTED = "its signature is looked at"
    # About its class.
    METHOD = "a method without an object"
    NO_CONSTRUCTOR = "its class has no constructor"
    NO_PLACE = "its class can't keep a collection"
    AUTOGRAD = "of an autograd function"
    BASE_OUTSIDE = "its class has a base of another project"
    METACLASS = "its class has a metaclass or __new__"
    CLASS_DECORATED = "its class is decorated"
    OWN_ATTRIBUTE = "its class keeps or shows attributes itself"
    OTHER_ROLES = "its class has models of several roles"
    # About the globals.
    MAKES_GROUPS = "has the groups made"
    FAKES = "fakes ranks, or is called by what does"
    ALIKE = "to be answered alike with what asks them"
    OF_THE_JOB = "asks for state of the job"


@dataclass(frozen=True)
class Served:
    """A use that is rewritten."""

    site: Site  # what is there before the migration
    how: How  # from what it is served
    text: str  # what is written in place of ``site.text``
    why: str = ""  # it may turn to the globals, as :class:`Why` says; empty where it never does
    detail: str = ""  # what the check of the result found, where they serve for that


@dataclass(frozen=True)
class Left:
    """A use that stays as it is."""

    site: Site  # what is there
    reason: str  # code of why, for ``megapg explain``
    detail: str = ""  # what is special about this one; may be empty
    suggestion: str = ""  # what to write by hand; may be empty


@dataclass(frozen=True)
class Noticed:
    """A place in tests that notices what becomes of the source."""

    file: str  # the file
    line: int  # in it
    what: str  # what is there, and what becomes of that
    instead: str  # what to write there


@dataclass(frozen=True)
class Callee:
    """A call by a function that has a collection, or a model, of what asks the globals about the
    same kind of groups; or by one that asks the globals, of what asks a model that it is passed.
    Lines are those of the new text.
    """

    file: str  # of the call
    line: int  # of the call
    function: str  # that calls
    asks: str  # of what that asks, as it is written: a collection, or a model; or the globals
    callee: str  # what is called
    what: str  # a getter, or a field, that is asked of the other there or behind it
    place: str  # where, as ``file:line``; or the file of a Megatron-core outside
    instead: str  # what to write


EXCUSE = "  # noqa: F401"
WHY_UNUSED = "# Unused here, but without it circular imports fail."


@dataclass(frozen=True)
class Edit:
    """One change of a file: ``text[start:stop]`` becomes ``new``."""

    start: int  # index of the first character in the old text
    stop: int  # index behind the last one
    new: str  # what is there instead
    # ``site``, which may be of a function that ``functools.partial`` of it replaces; ``parameter``,
    # ``argument``, ``gradient`` (one more returned), ``statement`` or ``import``; ``docstring`` for
    # a line of one; ``layout`` for what is between tokens; ``excuse`` for a comment on an import;
    # ``text`` for that of a file that is ours.
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
    """A file with edits that passed verification."""

    file: str  # its name in reports
    path: Path  # where it is
    before: bytes  # its bytes now
    after: bytes  # its bytes when written
    text: str  # the text before, which the edits are about
    edits: tuple[Edit, ...]  # in the order of the file, without overlaps
    # Names of files without whose new text this one would not work: it passes what functions there
    # only take then.
    requires: frozenset[str] = frozenset()
    # Whether it is one of ours that the others import, and whether there is none yet.
    is_runtime: bool = False
    is_new: bool = False


def located(file: Rewritten) -> Iterator[tuple[Edit, dict[str, int]]]:
    """Every edit with the region that it replaces, under the names that reports use, as editors
    count: lines and columns from 1, in characters.
    """
    starts = line_starts(file.text)

    def place(index: int) -> tuple[int, int]:
        line = bisect_right(starts, index)
        return line, index - starts[line - 1] + 1

    for edit in file.edits:
        (line, column), (end_line, end_column) = place(edit.start), place(edit.stop)
        region = {"line": line, "column": column, "end_line": end_line, "end_column": end_column}
        yield edit, region


@dataclass(frozen=True)
class Root:
    """A place where the globals are turned to because nobody passed a collection."""

    file: str  # the file
    function: str  # qualified name of the function; empty at module level
    fields: tuple[str, ...]  # what it needs
    serves: int  # how many of its own uses end there
    why: str  # nobody did, as :class:`Why` says: for most of these


@dataclass(frozen=True)
class Start:
    """A function that takes the collection and is passed none somewhere."""

    file: str  # its file
    line: int  # where it begins
    function: str  # its qualified name; of a constructor that of its class
    # Where it is named and passed nothing, as ``file:line``; none where nobody in the project does.
    places: tuple[str, ...]
    # How many uses no longer turn to the globals once all of these pass a collection: those behind
    # it that nothing else reaches.
    serves: int


@dataclass(frozen=True)
class Migration:
    """The whole of it. Nothing is written yet."""

    served: Sequence[Served]  # uses that are rewritten, by file and position
    # Uses that stay, by file and position; those with ``# megapg: keep`` are in neither.
    left: Sequence[Left]
    files: Sequence[Rewritten]  # the files that change, by name
    roots: Sequence[Root]  # where the globals are still turned to
    # Files that could not be looked into, and such whose rewrite failed verification (those are
    # untouched and their uses are in ``left`` with the reason ``unverified``).
    problems: Sequence[Problem]
    findings: Findings  # what is in the project
    starts: Sequence[Start] = ()  # where to pass a collection, what serves most first
    # For each use that has a replacement, the number of the rule in
    # :data:`megapg.migrate.decide.rules.RULES` that applies first.
    decided_by: Sequence[tuple[Site, int]] = ()
    noticed: Sequence[Noticed] = ()  # places in tests, by file and line
    callees: Sequence[Callee] = ()  # calls of what still asks the globals, by file and line
