"""Read the names that a module binds at its top level."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Table:
    """The names that a module binds at its top level."""

    imports: dict[str, set[str]] = field(default_factory=dict)  # name -> absolute dotted names
    # The same with the imports in functions.
    everywhere: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    stars: list[str] = field(default_factory=list)  # modules of ``from module import *``
    others: set[str] = field(default_factory=set)  # names that are assigned to
    functions: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    exported: frozenset[str] = frozenset()  # in ``__all__``


def read_table(tree: ast.Module, absolute: Callable[[str], str]) -> Table:
    """Return the names of a module.

    Args:
        tree: the module.
        absolute: returns a dotted name without leading dots.
    """
    table = Table()
    for node in ast.walk(tree):
        for name, dotted in _imports(node, absolute):
            table.everywhere[name].add(dotted)
        if isinstance(node, ast.Global):
            table.others |= set(node.names)
    for node in _top_level(tree):
        for name, dotted in _imports(node, absolute):
            if name == "*":
                table.stars.append(dotted.removesuffix(".*"))
            else:
                table.imports.setdefault(name, set()).add(dotted)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            table.functions.add(node.name)
        elif isinstance(node, ast.ClassDef):
            table.classes.add(node.name)
        elif not _read_alias(node, table):
            table.others |= set(_stored(node))
    return table


def _read_alias(node: ast.stmt, table: Table) -> bool:
    """Note ``__all__``, ``name = None`` and ``name = imported.name``; return True for these."""
    if not isinstance(node, ast.Assign) or len(node.targets) > 1:
        return False
    target, (head, dot, rest) = _dotted(node.targets[0]), _dotted(node.value).partition(".")
    if target == "__all__":
        texts = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
        table.exported = frozenset(each for each in texts if isinstance(each, str))
    elif head in table.imports and isinstance(node.targets[0], ast.Name):
        found = {each + dot + rest for each in table.imports[head]}
        table.imports.setdefault(target, set()).update(found)
    else:
        return isinstance(node.value, ast.Constant) and node.value.value is None
    return True


def _imports(node: ast.AST, absolute: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement imports, each with its absolute dotted name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield name, alias.name if alias.asname else name
    elif isinstance(node, ast.ImportFrom):
        module = absolute("." * node.level + (node.module or ""))
        for alias in node.names:
            yield alias.asname or alias.name, f"{module}.{alias.name}"


def _top_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those in ``if``, ``try`` and ``with``."""
    waiting: list[ast.stmt] = list(reversed(tree.body))
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
            for handler in getattr(node, "handlers", ()):
                inner += handler.body
            waiting += reversed(inner)


def _stored(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds; statements in its branches are apart."""
    parts: Sequence[ast.AST] = [node]
    if isinstance(node, ast.Import | ast.ImportFrom | ast.Try):
        parts = []
    elif isinstance(node, ast.If):
        parts = [node.test]
    elif isinstance(node, ast.With):
        parts = node.items
    for each in (inner for part in parts for inner in ast.walk(part)):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.MatchAs | ast.MatchStar) and each.name:
            yield each.name
        elif isinstance(each, ast.MatchMapping) and each.rest:
            yield each.rest
        elif isinstance(each, ast.FunctionDef | ast.ClassDef) and each is not node:
            yield each.name  # in a loop or a match


def _dotted(node: ast.expr) -> str:
    """Return the text of a name or of attributes of a name; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""
