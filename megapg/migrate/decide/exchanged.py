"""Which functions make the groups of the globals, or put others in their place. A model that such
a function holds has the groups of before.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from megapg.migrate.decide.references import References
from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.sites import Kind
from megapg.migrate.python.scopes import Scope, Use, last_name
from megapg.upstream.mapping import RANK_GLOBALS

_MAKING = frozenset({"initialize_model_parallel", "destroy_model_parallel"})


def owning(index: Index) -> set[Scope]:
    """The functions that make or end the groups, or have an object of another project do so."""
    found = {
        each.use.scope.unit
        for each in index.located
        if each.site.kind is Kind.CALL and each.site.name in _MAKING
    }
    for path in {path for name in _MAKING for path in index.everywhere(name)}:
        analysis = index.analysis(path)
        for unit, calls in analysis.calls.items() if analysis is not None else ():
            if any(_is_of_a_maker(use, call, path, index) for use, call in calls):
                found.add(unit)
    return {unit for unit in found if unit is not None}


def _is_of_a_maker(use: Use, call: ast.Call, path: Path, index: Index) -> bool:
    """Whether a call is of a method of something unknown, such as Megatron-Bridge's providers of
    models.
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _MAKING:
        return False
    found = index.resolver.expression(call.func, use.scope, path)
    return all(each.kind == "unknown" for each in found)


def exchanging(index: Index, references: References) -> set[Scope]:
    """The functions that put other groups into the globals, be it by way of others."""
    found: set[Scope] = set()
    waiting = [(e.use.scope.unit, e.path) for e in index.located if _puts_a_group(e)]
    while waiting:
        unit, path = waiting.pop()
        if unit is not None and unit not in found:
            found.add(unit)
            calls = references.of(unit, path)
            waiting += [(e.use.scope.unit, e.path) for e in calls if e.call is not None]
    return found


def _puts_a_group(located: Located) -> bool:
    """Whether a site puts another group, or the ranks of one, in the place of what the globals
    have; or whatever a table of them says.
    """
    site, call, above = located.site, located.use.parents.node, located.use.parents.above
    if site.kind is Kind.MODULE and isinstance(call, ast.Call) and last_name(call.func) == "vars":
        targets = getattr(above.node, "targets", ()) if above else ()
        names = {each.id for each in targets if isinstance(each, ast.Name)}
        return any(_fills(each, call, names) for each in located.use.scope.nodes)
    if site.kind is Kind.PATCHED and isinstance(located.node, ast.Call):
        called = located.node.func
        return not site.name and isinstance(called, ast.Name) and called.id == "setattr"
    is_a_group = site.name.startswith("_") and "_GROUP" in site.name
    return site.kind is Kind.ASSIGNED and (is_a_group or site.name in RANK_GLOBALS)


def _fills(node: ast.AST, table: ast.expr, names: Collection[str]) -> bool:
    """Whether an expression puts something into a table, or into a variable that it is bound to."""
    puts = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    updates = isinstance(node, ast.Attribute) and node.attr == "update"
    of = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
    is_it = of is table or (isinstance(of, ast.Name) and of.id in names)
    return (puts or updates) and is_it
