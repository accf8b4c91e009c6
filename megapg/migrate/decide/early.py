"""What a constructor calls of its object before that has a part, and others call once it has some:
these may carry what the first call could not hear of.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from pathlib import Path

from megapg.migrate.decide.references import References
from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry
from megapg.migrate.python.methods import is_self
from megapg.migrate.python.scopes import Scope
from megapg.upstream.mapping import COLLECTION_NAMES


def is_early_and_late(
    method: Scope, path: Path, taking: Collection[Scope], index: Index, references: References
) -> bool:
    """Whether a method is one of these, of objects that are passed no collection.

    Args:
        method: that asks its object.
        path: of its file.
        taking: the functions that get the parameter.
        index: the project.
        references: of the same index.
    """
    klass = method.parent
    if klass is None or klass.kind != "class" or method.name == "__init__":
        return False
    above = [e for e in ancestry(klass, path, index.resolver) if isinstance(e, Scope)]
    makers = [maker for each in above for maker in each.defined("__init__")]
    if any(maker in taking for maker in makers) or any(
        name in COLLECTION_NAMES for each in above for name in each.attributes
    ):
        return False
    return _is_called_early(method.name, makers) and references.is_called_elsewhere(method, path)


def _is_called_early(name: str, makers: list[Scope]) -> bool:
    """Whether constructors call a method before they give their object what a call gives."""
    for maker in reversed(makers):  # that of the base comes first
        for each in sorted(maker.nodes, key=lambda node: getattr(node, "lineno", 0)):
            match each:
                case ast.Call(ast.Attribute(owner, called)) if is_self(owner, maker):
                    if called == name:
                        return True
                case ast.Assign([ast.Attribute(owner)], ast.Call()) if is_self(owner, maker):
                    return False
    return False
