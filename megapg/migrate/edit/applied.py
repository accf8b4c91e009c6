"""The methods of autograd functions, which run where these are applied."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.edit.lacking import not_applied_to
from megapg.migrate.find.meaning import Resolver
from megapg.migrate.find.models import ancestry
from megapg.migrate.python.scopes import Scope, Use

_METHODS = ("forward", "backward")


@dataclass(frozen=True)
class Applied:
    """Finds them in the new texts of a project."""

    resolver: Resolver

    def run_by(
        self, applied: ast.expr, call: ast.Call, use: Use, path: Path
    ) -> Iterator[tuple[Scope, Path, frozenset[str]]]:
        """Those that run where a value is applied, and the collections that they are not passed."""
        for thing in self.resolver.expression(applied, use.scope, path):
            if thing.scope is not None and thing.path is not None:
                for name in _METHODS if self._is_one(thing.scope, thing.path) else ():
                    for each in thing.scope.defined(name):
                        yield each, thing.path, not_applied_to(each, call)

    def of(self, method: Scope, path: Path) -> str:
        """The autograd function of which a method is; empty where it is of none."""
        klass = method.parent if method.name in _METHODS else None
        return klass.qualname if klass is not None and self._is_one(klass, path) else ""

    def _is_one(self, klass: Scope, path: Path) -> bool:
        above = ancestry(klass, path, self.resolver)
        return any(isinstance(each, str) and each.endswith("autograd.Function") for each in above)
