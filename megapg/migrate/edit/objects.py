"""What the objects of a class are asked in the new texts. A method that asks nothing itself goes
with what the other methods of its object ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.edit.mixing import CONSTRUCTOR, PASSED, TextOfFile
from megapg.migrate.find.axes import axes_of
from megapg.migrate.find.meaning import Resolver
from megapg.migrate.python.methods import class_of, kept, self_of
from megapg.migrate.python.scopes import FunctionNode, Scope


def methods_of(klass: Scope) -> Iterator[Scope]:
    """The functions that a class defines."""
    for name in klass.bindings:
        yield from (each for each in klass.defined(name) if each.kind == "function")


@dataclass(frozen=True)
class Objects:
    """Finds what is asked of them."""

    resolver: Resolver
    text_of: Callable[[Path], TextOfFile | None]

    def asked_beside(self, method: Scope, path: Path) -> Mapping[str, tuple[Scope, Path]]:
        """About which kinds of groups the object of a method is asked, and a method that does. What
        a constructor is passed is what its object has.
        """
        klass = method.parent
        is_one = klass is not None and klass.kind == "class" and bool(self_of(method))
        return self._asked(klass, path) if klass is not None and is_one else {}

    def bases(self, klass: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        """What a class is made of, as far as that is in the project."""
        for base in getattr(klass.node, "bases", ()) if klass.parent is not None else ():
            for thing in self.resolver.expression(base, klass.parent or klass, path):
                if thing.kind == "class" and thing.scope is not None and thing.path is not None:
                    yield thing.scope, thing.path

    def are_of_one(self, method: Scope, other: Scope, path: Path) -> bool:
        """Whether a method is one of the object of another one, and no constructor."""
        klass = other.parent
        line = self._line(klass, path) if klass is not None and klass.kind == "class" else ()
        return class_of(method) is None and any(method.parent is each for each, _ in line)

    @kept
    def _line(self, klass: Scope, path: Path) -> list[tuple[Scope, Path]]:
        """A class and what it is made of."""
        line = [(klass, path)]
        for each, at in line:  # grows
            line += [base for base in self.bases(each, at) if base not in line]
        return line

    @kept
    def _asked(self, klass: Scope, path: Path) -> Mapping[str, tuple[Scope, Path]]:
        found: dict[str, tuple[Scope, Path]] = {}
        for each, at in self._line(klass, path):
            text = self.text_of(at)
            if text is None:
                continue
            for method in methods_of(each):
                of_it = ("self", PASSED) if method.name == CONSTRUCTOR else ("self",)
                asked = text.asked_by(method.node) if isinstance(method.node, FunctionNode) else ()
                for asking in asked:
                    if asking.carrier in of_it and not asking.by_core:
                        for axis in axes_of(asking.what):
                            found.setdefault(axis, (method, at))
        return found
