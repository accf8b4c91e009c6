"""Which functions put other groups into the globals. A model that such a function holds has the
groups of before.
"""

from __future__ import annotations

import ast
from collections.abc import Collection

from megapg.migrate.decide.references import References
from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.sites import Kind
from megapg.migrate.python.scopes import Scope, last_name
from megapg.upstream.mapping import RANK_GLOBALS


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
