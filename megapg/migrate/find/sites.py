"""A use of Megatron's globals in source, and all that a rewriter has to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megapg.migrate.python.source import Span
from megapg.upstream.mapping import Argument, Refusal, Replacement


class Kind(StrEnum):
    """How the globals are used."""

    CALL = "call"  # a getter is called
    VALUE = "value"  # a getter is handed on
    PRIVATE = "private"  # a private global is read
    ASSIGNED = "assigned"  # something is written to the module
    PATCHED = "patched"  # setattr(), patch.object(): by module and name
    STRING = "string"  # patch("...parallel_state.get_x")
    DYNAMIC = "dynamic"  # getattr(), hasattr()
    MODULE = "module"  # the module is handed on


@dataclass(frozen=True)
class Carrier:
    """Something in scope at a site from which the groups can be had."""

    kind: str  # ``collection``, or ``model``, which may carry one
    expression: str  # what to write to get at it
    origin: str  # ``parameter``, ``inner`` of a function further in, ``local`` or ``attribute``
    may_be_none: bool = False  # it is a parameter that is None by default
    certain: bool = True  # it is there whenever the site runs, and holds what its name says
    is_part: bool = False  # it may be a part of a model
    # What its constructor reads of the collection that it keeps, as in ``self.pg_collection.cp``.
    reads: tuple[str, ...] = ()
    # Of a collection: the groups that it certainly has; None where nobody can tell.
    fields: frozenset[str] | None = None


@dataclass(frozen=True)
class Site:
    """One use."""

    file: str  # path, relative to the project
    span: Span  # of the whole expression: of a call up to its closing parenthesis
    exact: bool  # whether the span was confirmed; if not it is that of the f-string around
    name: str  # the getter, or the private global; empty for the module as a whole
    kind: Kind  # how it is used
    text: str  # the source of the expression
    arguments: tuple[Argument, ...]  # of a call
    function: str  # qualified name of the function around; empty at module level
    class_name: str  # qualified name of the class around; empty where there is none
    carriers: tuple[Carrier, ...]  # from which the groups can be had here, the best first
    answer: Replacement | Refusal  # the replacement, or why there is none
    keep: bool  # whether a ``# megapg: keep`` is on one of its lines
    in_fstring: bool  # whether it lies in an f-string, where quotes may not be reused before 3.12

    @property
    def reason(self) -> str:
        """The code of why nothing serves; empty where something does."""
        return self.answer.reason if isinstance(self.answer, Refusal) else ""

    @property
    def replacement(self) -> str:
        """The expression to write; empty where there is none."""
        return self.answer.expression if isinstance(self.answer, Replacement) else ""

    @property
    def place(self) -> str:
        """``file:line:column``."""
        return f"{self.file}:{self.span.line}:{self.span.column}"
