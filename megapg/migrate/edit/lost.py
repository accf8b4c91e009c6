"""Whether in a new text a collection is lost that its object is asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megapg.migrate.edit.mixing import CONSTRUCTOR, PASSED, kept_or_handed_on
from megapg.migrate.python.methods import parameters
from megapg.migrate.python.scopes import FunctionNode, last_name, walk


def lost_in(tree: ast.Module) -> Iterator[str]:
    """The classes whose constructor takes a collection and keeps it nowhere, while others of their
    methods ask the object for one.
    """
    for node in ast.walk(tree):
        body = node.body if isinstance(node, ast.ClassDef) else ()
        methods = [each for each in body if isinstance(each, FunctionNode)]
        if isinstance(node, ast.ClassDef) and any(map(_drops, methods)):
            others = (each for each in methods if each.name != CONSTRUCTOR)
            if any(_asks_self(call) for each in others for call in walk(each)):
                yield node.name


def _drops(method: FunctionNode) -> bool:
    """Whether a constructor takes a collection, and neither keeps it nor hands it on whole."""
    if method.name != CONSTRUCTOR or all(each.arg != PASSED for each in parameters(method)):
        return False
    return not any(
        isinstance(each, ast.Name) and each.id == PASSED
        for value in kept_or_handed_on(walk(method))
        for each in (value, *getattr(value, "values", ()))
    )


def _asks_self(node: ast.AST) -> bool:
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    return (
        isinstance(node, ast.Call)
        and last_name(node.func) == "groups_of"
        and isinstance(first, ast.Name)
        and first.id == "self"
    )
