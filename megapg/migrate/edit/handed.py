"""What functions of a new text ask about a model that they are passed: the function that passes it
and asks the globals about the same kind of groups may hear of other ones.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megapg.layout import FIELDS
from megapg.migrate.edit.absent import lines_in_place_of
from megapg.migrate.edit.lacking import none_at_first, not_passed, without_any
from megapg.migrate.edit.mixing import GLOBALS, Asking, TextOfFile
from megapg.migrate.edit.values import Calls
from megapg.migrate.find.axes import axes_of
from megapg.migrate.migration import Callee
from megapg.migrate.python.methods import class_of, passed
from megapg.migrate.python.scopes import FunctionNode, Scope, Use
from megapg.upstream.mapping import COLLECTION_NAMES

# Further than anybody hands a model on.
_DEEPEST = 4

Called = Callable[[Use, ast.Call, Scope, Path], Iterable[tuple[Scope, Path]]]
"""The functions of the project that a call of a function in a file runs."""


@dataclass(frozen=True)
class Handed:
    """Follows the models that are handed on in the new texts of a project."""

    text: Callable[[Path], TextOfFile | None]
    calls_in: Callable[[Path], Calls]
    called: Called

    def reported(self, unit: Scope, path: Path) -> Iterator[tuple[ast.Call, Callee]]:
        """The calls by which a function that asks the globals has a model asked about the same kind
        of groups.
        """
        text = self.text(path)
        if text is None or not (own := _of_globals(unit.node, text)):
            return
        for use, call in self.calls_in(path).get(unit, ()):
            for function, at in self.called(use, call, unit, path):
                lacking = not_passed(function, call, unit)
                given = passed(function, call)
                found = next(self._asked(function, at, given, own, lacking), None)
                if found is not None and function is not unit:
                    yield call, _reported(text.name, call, unit, function, *found)
                    break

    def _asked(
        self,
        function: Scope,
        path: Path,
        passed: Mapping[str, ast.expr],
        axes: frozenset[str],
        left_out: frozenset[str],
    ) -> Iterator[tuple[Asking, str, ast.expr]]:
        """What is asked of the parameters of a function about some kinds of groups, where, and what
        they are passed.
        """
        for name, given in passed.items():
            if name not in COLLECTION_NAMES and not isinstance(given, ast.Constant):
                for asking, place in self._behind(function, path, name, axes, left_out, 0):
                    yield asking, place, given

    def _behind(
        self,
        function: Scope,
        path: Path,
        name: str,
        axes: frozenset[str],
        left_out: frozenset[str],
        depth: int,
    ) -> Iterator[tuple[Asking, str]]:
        text, node = self.text(path), function.node
        if text is None or not isinstance(node, FunctionNode):
            return
        for each in text.asked_by(node):
            if each.carrier == name and not each.by_core and axes_of(each.what) & axes:
                passed_one = none_at_first(function) - left_out  # for want of which others ask
                if not any(each.line in lines_in_place_of(function, one) for one in passed_one):
                    yield each, f"{text.name}:{each.line}"
        for use, call in self.calls_in(path).get(function, ()) if depth < _DEEPEST else ():
            if any(_is_named(each, name) for each in _given(call)):
                for called, at in self.called(use, call, function, path):
                    lacking = not_passed(called, call, function)
                    lacking |= without_any(called, call, left_out)
                    for parameter, given in passed(called, call).items():
                        if _is_named(given, name) and called is not function:
                            yield from self._behind(called, at, parameter, axes, lacking, depth + 1)


def _reported(
    file: str,
    call: ast.Call,
    unit: Scope,
    called: Scope,
    asking: Asking,
    place: str,
    given: ast.expr,
) -> Callee:
    field = f', "{asking.what}"' if asking.what in FIELDS else ""
    model, name = ast.unparse(given), (class_of(called) or called).qualname
    instead = f"ask megapg.groups_of({model}{field}) here, too, and pass it to all that is called"
    return Callee(file, call.lineno, unit.qualname, GLOBALS, name, asking.what, place, instead)


def _of_globals(function: ast.AST, text: TextOfFile) -> frozenset[str]:
    """The kinds of groups about which a function asks the globals itself."""
    if not isinstance(function, FunctionNode):
        return frozenset()
    asked = (e for e in text.asked_by(function) if e.carrier == GLOBALS and not e.by_core)
    return frozenset[str]().union(*(axes_of(each.what) for each in asked))


def _given(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (each.value for each in call.keywords)


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
