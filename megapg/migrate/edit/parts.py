"""The parts that an object has built by a specification: which classes a project gives for them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megapg.migrate.edit.values import Calls
from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import Resolver, Thing
from megapg.migrate.python.scopes import Use, last_name

# Megatron-core's function that builds one, and the class of a specification.
_BUILDING, _SPECIFICATION = "build_module", "ModuleSpec"
_KEEPING = "Submodules"  # so end the names of the classes whose attributes are specifications


@dataclass(frozen=True)
class Parts:
    """Finds the classes of which they may be, by the new texts of a project."""

    index: Index
    resolver: Resolver
    calls_in: Callable[[Path], Calls]

    def built(self, call: ast.Call) -> Iterator[tuple[Thing, ast.Call]]:
        """The classes of the project of which a call may build a part, and the call as one of the
        class itself.
        """
        if last_name(call.func) != _BUILDING or not call.args:
            return
        of, *others = call.args
        own = ast.copy_location(ast.Call(of, others, call.keywords), call)
        if isinstance(of, ast.Attribute):
            yield from ((each, own) for each in self._classes.get(of.attr, ()))

    @cached_property
    def _classes(self) -> Mapping[str, Mapping[Thing, None]]:
        """What the source gives for the attributes that specifications have."""
        found: dict[str, dict[Thing, None]] = defaultdict(dict)
        for path in self.index.everywhere(_SPECIFICATION):
            if self.index.modules.is_test(path):
                continue
            for calls in self.calls_in(path).values():
                for use, call in calls:
                    for each in call.keywords if last_name(call.func).endswith(_KEEPING) else ():
                        if each.arg:
                            found[each.arg].update(self._given(each.value, use, path))
        return found

    def _given(self, value: ast.expr, use: Use, path: Path) -> dict[Thing, None]:
        """The classes that an expression, or the specification that it makes, stands for."""
        if isinstance(value, ast.Call) and last_name(value.func) == _SPECIFICATION:
            given = [each.value for each in value.keywords if each.arg == "module"]
            value = next(iter((*given, *value.args)), value)
        things = self.resolver.expression(value, use.scope, path)
        found = {
            each.scope.qualname: each for each in things if each.kind == "class" and each.scope
        }
        return dict.fromkeys(found[each] for each in sorted(found))
