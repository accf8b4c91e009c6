"""Facts about one source file, as plain data: what :mod:`megapg.migrate.scan` finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megapg.migrate.uses import Span, Use


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

    name: str
    annotation: str = ""  # its source


@dataclass
class Function:
    """A function or method."""

    path: Path
    name: str  # qualified, without ``<locals>``
    span: Span
    parameters: tuple[Parameter, ...]
    any_keyword: bool  # True if it takes ``**kwargs``
    decorators: tuple[str, ...]  # absolute dotted names; empty for other expressions
    of_class: str  # qualified name of the class it is a method of; empty for a function
    outer: str  # qualified name of the function around it; empty if there is none
    bound: frozenset[str]  # its parameters and variables
    names: set[str] = field(default_factory=set)  # that it and the functions in it use
    deleted: set[str] = field(default_factory=set)  # names that these delete
    makes_groups: bool = False  # True if it calls ``initialize_model_parallel`` or the like
    looks_at_itself: bool = False  # True if it calls ``locals()`` or the like
    fakes_ranks: bool = False  # True if it calls ``set_tensor_model_parallel_rank`` or the like

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_static(self) -> bool:
        """True for a static method or a class method."""
        return any(each.endswith(("staticmethod", "classmethod")) for each in self.decorators)

    @property
    def self_name(self) -> str:
        """The parameter with the object; empty for functions and static methods."""
        usual = self.of_class and self.parameters and not self.is_static
        return self.parameters[0].name if usual and self.last_name != "__new__" else ""


@dataclass
class Class:
    """A class."""

    path: Path
    name: str  # qualified
    bases: tuple[str, ...]  # absolute dotted names; empty for other expressions
    decorators: tuple[str, ...]
    has_keywords: bool  # True if its bases are followed by keywords such as ``metaclass=``
    methods: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)  # set by the class body or on ``self``


@dataclass(frozen=True)
class Where:
    """How a use or a call lies in its function."""

    inline: bool = False  # in a lambda, or evaluated while the function or class is defined
    in_class: bool = False  # in the body of a class, outside of its methods
    none: frozenset[str] = frozenset()  # names that are None here, by the ``if`` around
    quotes: str = ""  # those of the f-strings around
    in_use: bool = False  # in the arguments of another use, which stay as they are
    as_list: bool = False  # an argument, subscripted, or on the right of ``in``: None would fail
    # Line of the statement around it, if that runs whenever the function gets there; else 0.
    line: int = 0


@dataclass(frozen=True)
class Call:
    """A call of something in the project."""

    span: Span
    function: str  # qualified name of the function around; empty at module level
    callee: str  # absolute dotted name; ``super().__init__`` for that
    keywords: frozenset[str]
    passed: frozenset[str]  # last names of the positional arguments: ``group`` for ``self.group``
    where: Where


@dataclass(frozen=True)
class FoundUse:
    """A use and its surroundings."""

    use: Use
    root: str  # the name that it begins with in the file
    where: Where

    @property
    def span(self) -> Span:
        return self.use.span

    @property
    def function(self) -> str:
        """The qualified name of the function around; empty at module level."""
        return self.use.function


@dataclass
class Facts:
    """The facts about one file."""

    path: Path
    uses: list[FoundUse] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)  # names that are bound several times
    classes: dict[str, Class] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    values: set[str] = field(default_factory=set)  # dotted names that are used without a call
    replaced: set[str] = field(default_factory=set)  # dotted names that it assigns to
    reached: set[str] = field(default_factory=set)  # dotted names by which it uses the globals
    # Strings with a dotted name of a getter -> the name, and the getter.
    strings: dict[Span, tuple[str, str]] = field(default_factory=dict)
    loads: Mapping[str, int] = field(default_factory=dict)  # how often a name is read


Everything = Mapping[Path, Facts]

HERE = "<here>"
"""The first part of the dotted name of something in the same file."""
