"""A use of Megatron's globals in a source file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megapg.upstream.mapping import Refusal, Replacement


class Kind(StrEnum):
    """How a file uses the globals."""

    CALL = "call"  # calls a getter
    VALUE = "value"  # passes or stores a getter
    PRIVATE = "private"  # reads a private variable of the module
    MODULE = "module"  # passes or stores the module
    ASSIGNED = "assigned"  # assigns to an attribute of the module
    STRING = "string"  # names a getter in a string


@dataclass(frozen=True, order=True)
class Span:
    """A range of a file's text. Lines count from 1, columns are characters and count from 1."""

    line: int
    column: int
    end_line: int
    end_column: int  # of the first character after the range


@dataclass(frozen=True)
class Use:
    """One use."""

    file: str  # path relative to the project's root, with forward slashes
    span: Span  # of the whole expression
    kind: Kind
    name: str  # of the getter or private variable; empty for the module
    text: str  # source of the expression
    function: str  # qualified name of the function around it; empty at module level
    answer: Replacement | Refusal  # what to write instead, or why nothing can be written
    keep: bool = False  # True if one of its lines has the comment "# megapg: keep"

    @property
    def place(self) -> str:
        """``file:line:column``."""
        return f"{self.file}:{self.span.line}:{self.span.column}"
