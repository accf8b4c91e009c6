"""Which functions ask a model that they are passed, where who calls them asks a collection about
the same kind of groups: both have to go by that.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.edit.handed import Called
from megapg.migrate.edit.mixing import PASSED, TextOfFile
from megapg.migrate.edit.values import Calls
from megapg.migrate.find.axes import axes_of
from megapg.migrate.python.methods import parameters, passed
from megapg.migrate.python.scopes import FunctionNode, Opaque, Scope, Use


@dataclass(frozen=True)
class Modelled:
    """Finds them in the new texts of a project."""

    text_of: Callable[[Path], TextOfFile | None]
    calls_in: Callable[[Path], Calls]
    called: Called

    def of_file(self, path: Path) -> Iterator[tuple[Scope, Path, Scope]]:
        """Those that functions of a file call, with their files, and who calls each."""
        for unit, calls in self.calls_in(path).items():
            if unit is None or PASSED not in {each.arg for each in parameters(unit.node)}:
                continue
            axes = self._of_passed(unit, path)
            for use, call in calls:
                if any(map(_hands_it_on, call.keywords)):
                    for function, at in self.called(use, call, unit, path):
                        axes |= self._of_passed(function, at)
            for use, call in calls if axes else ():
                for function, at in self.called(use, call, unit, path):
                    if any(self._asked(function, at, use, call, axes)):
                        yield function, at, unit

    def _of_passed(self, function: Scope, path: Path) -> set[str]:
        """The kinds of groups about which a function asks what it is passed."""
        text, node = self.text_of(path), function.node
        asked = text.asked_by(node) if text is not None and isinstance(node, FunctionNode) else ()
        return {axis for e in asked if e.carrier == PASSED for axis in axes_of(e.what)}

    def _asked(
        self, function: Scope, path: Path, use: Use, call: ast.Call, axes: set[str]
    ) -> Iterator[str]:
        """The models that a function asks, and that its caller is passed itself, about some kinds
        of groups.
        """
        text, node = self.text_of(path), function.node
        is_free = function.parent is not None and function.parent.kind == "module"
        if text is None or not is_free or not isinstance(node, FunctionNode):
            return
        takes = {each.arg for each in parameters(node)}
        if PASSED in takes:
            return
        for each in text.asked_by(node):
            is_one = each.carrier in takes and not each.by_core and axes_of(each.what) & axes
            if is_one and _is_passed_on(passed(function, call).get(each.carrier), use.scope):
                yield each.carrier


def _hands_it_on(given: ast.keyword) -> bool:
    return given.arg == PASSED and isinstance(given.value, ast.Name) and given.value.id == PASSED


def _is_passed_on(given: ast.expr | None, scope: Scope) -> bool:
    """Whether an argument is a parameter of a function around it."""
    found = scope.find(given.id) if isinstance(given, ast.Name) else None
    bound = found[1] if found is not None else []
    return len(bound) == 1 and isinstance(bound[0], Opaque) and bound[0].parameter
