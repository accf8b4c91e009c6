"""A use of Megatron's globals in source, and all that a rewriter has to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megapg.migrate.mapping import Argument, Refusal, Replacement
from megapg.migrate.source import Span


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
    """Something in scope at a site from which the groups can be had.

    Attributes:
        kind: ``collection``; ``group``, which is of the field that the site asks for; ``model``,
            which may carry a collection.
        expression: what to write to get at it.
        origin: ``parameter``, ``local`` or ``attribute``.
        may_be_none: it is a parameter that is None by default.
        certain: it is there whenever the site runs, and holds what its name says.
    """

    kind: str
    expression: str
    origin: str
    may_be_none: bool = False
    certain: bool = True


@dataclass(frozen=True)
class Site:
    """One use.

    Attributes:
        file: path, relative to the project.
        span: of the whole expression: of a call up to its closing parenthesis.
        exact: whether the span was confirmed; if not it is that of the f-string around.
        name: the getter, or the private global; empty for the module as a whole.
        kind: how it is used.
        text: the source of the expression.
        arguments: of a call.
        function: qualified name of the function around; empty at module level.
        class_name: qualified name of the class around; empty where there is none.
        scope_kind: what the innermost scope is: ``module``, ``class``, ``function``, ``method``.
        bases: the bases of that class, as they are written.
        carriers: from which the groups can be had here, the best first.
        answer: the replacement, or why there is none.
        keep: whether a ``# megapg: keep`` is on one of its lines.
        in_fstring: whether it lies in an f-string, where quotes may not be reused before 3.12.
    """

    file: str
    span: Span
    exact: bool
    name: str
    kind: Kind
    text: str
    arguments: tuple[Argument, ...]
    function: str
    class_name: str
    scope_kind: str
    bases: tuple[str, ...]
    carriers: tuple[Carrier, ...]
    answer: Replacement | Refusal
    keep: bool
    in_fstring: bool

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
