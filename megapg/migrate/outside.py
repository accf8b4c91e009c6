"""What is taken from a module by others: names that have to stay when nothing in it uses them."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from megapg.migrate.imports import scopes
from megapg.migrate.index import Index
from megapg.migrate.resolve import UNKNOWN
from megapg.migrate.scopes import Analysis, Imported
from megapg.migrate.sites import Kind


def names_taken(index: Index) -> dict[Path, set[str]]:
    """For each file the names that other files import or reach through it, ``*`` for all; patches
    in tests that go through it count.
    """
    taken: dict[Path, set[str]] = defaultdict(set)
    for path, analysis in index.analyses():
        _imported(index, path, analysis, taken)
        _reached(index, path, analysis, taken)
    for located in index.located:
        if located.site.kind is Kind.STRING and isinstance(located.node, ast.Constant):
            parts = tuple(str(located.node.value).split("."))
            for length in range(1, len(parts)):
                for found in index.modules.ending(parts[:length]):
                    taken[found].add(parts[length])
    return taken


def _imported(index: Index, path: Path, analysis: Analysis, taken: dict[Path, set[str]]) -> None:
    for scope in scopes(analysis.module):
        froms = [each for bound in scope.bindings.values() for each in bound]
        for each in (*froms, *scope.stars):
            if isinstance(each, Imported) and each.member:
                for thing in index.resolver.module(each, path):
                    if thing.kind == "file" and thing.path is not None and thing.path != path:
                        taken[thing.path].add(each.member)


def _reached(index: Index, path: Path, analysis: Analysis, taken: dict[Path, set[str]]) -> None:
    for use in analysis.uses:
        chain: list[str] = []
        node: ast.expr = use.node
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        things = index.resolver.expression(node, use.scope, path) if chain else frozenset()
        for attribute in reversed(chain):
            if all(thing == UNKNOWN for thing in things):
                break
            for thing in things:
                if thing.kind == "file" and thing.path is not None:
                    taken[thing.path].add(attribute)
            things = index.resolver.attribute(things, attribute)
        parent = use.parents.node
        if isinstance(parent, ast.Call) and use.node in parent.args[:1] and len(parent.args) > 1:
            name = parent.args[1]  # setattr(module, "name", ...)
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                for thing in index.resolver.expression(use.node, use.scope, path):
                    if thing.kind == "file" and thing.path is not None:
                        taken[thing.path].add(name.value)
