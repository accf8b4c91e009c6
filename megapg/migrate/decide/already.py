"""What functions read of a collection before the migration: of it they have the rest asked, too."""

from __future__ import annotations

import ast

from megapg.migrate.find.axes import axes_of
from megapg.migrate.find.carriers import MODEL_NAMES
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import Alias, Scope, last_name
from megapg.upstream.mapping import COLLECTION_NAMES


@kept
def read_of_collections(unit: Scope) -> list[tuple[str, frozenset[str]]]:
    """The variables of whose collections a function reads groups, and of which kinds."""
    return [
        (name, axes)
        for node in unit.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and last_name(node.value) in COLLECTION_NAMES
        and (axes := axes_of(node.attr))
        and (name := _had_of(node.value, unit))
    ]


def _had_of(collection: ast.expr, unit: Scope) -> str:
    """The variable with a collection, or with the model of which it is had."""
    bound = unit.bindings.get(last_name(collection), ())
    first = bound[0].value if len(bound) == 1 and isinstance(bound[0], Alias) else None
    if isinstance(collection, ast.Name) and isinstance(first, ast.Call) and first.args:
        of = _root(first.args[0])
        if of in MODEL_NAMES or of in unit.instances:
            return of
    return _root(collection)


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return last_name(node)
