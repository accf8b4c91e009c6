"""What is decided: what serves each use, and which functions and calls get a parameter for it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megapg.migrate.decide.autograd import Applied
from megapg.migrate.decide.references import Reference
from megapg.migrate.find.index import Located
from megapg.migrate.find.sites import Carrier, Site
from megapg.migrate.migration import How, Left, Noticed, Start, Why
from megapg.migrate.python.scopes import Scope
from megapg.upstream.mapping import Replacement


@dataclass(frozen=True)
class Base:
    """An expression for a collection."""

    how: How  # from what it serves
    # ``resolve`` of the expression, a collection or None; ``groups_of`` it, which carries one, with
    # the fields that are read; the expression ``plain``.
    form: str
    expression: str  # what is at hand
    optional: bool = False  # whether what is at hand may be None
    made_here: bool = False  # whether it is a model that a variable of the function holds
    passed_first: bool = False  # whether what was passed to the function comes before it
    of_a_part: bool = False  # whether it may be a part of a model, which carries what it uses
    reads: tuple[str, ...] = ()  # of an object: what its constructor reads of its collection
    fields: frozenset[str] | None = None  # all that it certainly has; None where nobody can tell

    def as_read(self, field: str) -> str:
        """A group, as the constructor of the object reads it; empty where it does not."""
        of = self.reads if self.form == "groups_of" else ()
        found = next((each for each in of if each.endswith(f".{field}")), "")
        return found and f"{self.expression}.{found}"


GLOBALS = Base(How.RESOLVED, "resolve", "None")


@dataclass(frozen=True, eq=False)
class Decision:
    """A use and what serves it."""

    located: Located
    answer: Replacement
    base: Base

    @property
    def as_read(self) -> str:
        """The group, as the constructor of its object reads it; empty where it does not."""
        plain = self.answer.asks in ("group", "rank", "size")
        return self.base.as_read(self.answer.field) if plain else ""


@dataclass(frozen=True, eq=False)
class Passing:
    """A call that is given the collection, or a group of it to a function of Megatron-core; or a
    function that is called by another name.
    """

    reference: Reference  # the call, or the function
    path: Path  # of the file of the function that is called
    base: Base  # what it is given
    needs: tuple[str, ...]  # the fields that are read behind it
    group: str = ""  # the parameter, where it is given the one group that it needs

    @property
    def as_read(self) -> str:
        """The group, as the constructor of its object reads it; empty where it does not."""
        return self.base.as_read(self.needs[0]) if self.group else ""


@dataclass(frozen=True, eq=False)
class Taking:
    """A function that gets the parameter; or a constructor that has it, and gets to keep it."""

    function: Scope  # its scope
    path: Path  # of its file
    kept: bool  # whether it keeps it: a constructor on ``self``, a forward on the context
    # The statements behind which it is kept: those of bases keep what they are passed, which is not
    # that.
    behind: tuple[ast.stmt, ...] = ()
    is_new: bool = True  # whether it does not have the parameter yet
    at_first: bool = True  # whether it is kept before all else as well
    applied: Applied | None = None  # the autograd function, where it is the forward of one


@dataclass
class Plan:
    """What is to be done, in all files together; and the number of the rule that decided about each
    use.
    """

    # Of a file, and a function of it, the lines in which the groups may be made anew.
    renewals: Callable[[Path, Scope], Sequence[range]]
    decisions: list[Decision] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    taking: list[Taking] = field(default_factory=list)
    passing: list[Passing] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    noticed: list[Noticed] = field(default_factory=list)
    decided_by: list[tuple[Site, int]] = field(default_factory=list)
    whys: dict[Decision, Why] = field(default_factory=dict)  # of those that may end at the globals
    unpassed: set[Scope] = field(default_factory=set)  # that get the parameter for nobody, so far


def best(found: Sequence[Carrier]) -> Base | None:
    """The first of some carriers that is certain."""
    carrier = next((each for each in found if each.certain), None)
    if carrier is None:
        return None
    if carrier.kind == "model":
        made_here = carrier.origin == "local"
        part, model = carrier.is_part, carrier.expression
        return Base(
            How.MODEL,
            "groups_of",
            model,
            made_here=made_here,
            of_a_part=part,
            reads=carrier.reads,
        )
    if carrier.may_be_none:
        return Base(
            How.RESOLVED, "resolve", carrier.expression, optional=True, fields=carrier.fields
        )
    if carrier.origin == "attribute":
        # It may have some of the fields only; groups_of() of its owner looks further then.
        owner = carrier.expression.rpartition(".")[0]
        return Base(How.COLLECTION, "groups_of", owner, reads=carrier.reads)
    return Base(How.COLLECTION, "resolve", carrier.expression, fields=carrier.fields)
