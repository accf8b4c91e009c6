"""Which functions of a new text have the globals' groups made: what they ask is these."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.edit.values import Calls
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import Scope, Use, last_name

# Further than anybody follows what is reported.
_DEEPEST = 4
_MAKING = ("initialize_model_parallel", "destroy_model_parallel")


@dataclass(frozen=True)
class Makers:
    """Finds them in the new texts of a project."""

    calls_in: Callable[[Path], Calls]
    called: Callable[[Use, ast.Call, Scope, Path], Iterable[tuple[Scope, Path]]]

    @kept
    def has(self, unit: Scope, path: Path, depth: int = 0) -> bool:
        """Whether a function is one, be it by way of others."""
        called = list(self.calls_in(path).get(unit, ()))
        if any(last_name(each.func) in _MAKING for _, each in called):
            return True
        return depth < _DEEPEST and any(
            self.has(function, at, depth + 1)
            for use, call in called
            for function, at in self.called(use, call, unit, path)
            if function is not unit
        )
