"""What is taken from a module by others: names that have to stay when nothing in it uses them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import Things
from megapg.migrate.find.sites import Kind
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.scopes import Imported, scopes


def names_taken(index: Index, released: Mapping[Path, Collection[str]]) -> dict[Path, set[str]]:
    """For each file the names that other files import or reach through it, ``*`` for all. A
    patch in a test that goes through it is not heard any more, and does not count.

    Args:
        index: the project.
        released: the files that are asked about, with the names. Other files and names may be
            left out of the answer.
    """
    taken: dict[Path, set[str]] = defaultdict(set)
    names = {"*"}.union(*released.values())
    for path, analysis in index.analyses():
        for things, name in (
            *_imported(index, path, analysis, names),
            *_reached(index, path, analysis, names),
        ):
            for thing in things:
                if thing.kind == "file" and thing.path is not None:
                    taken[thing.path].add(name)
    for located in index.located:
        is_string = located.site.kind is Kind.STRING and not index.modules.is_test(located.path)
        if is_string and isinstance(located.node, ast.Constant):
            parts = tuple(str(located.node.value).split("."))
            for length in range(1, len(parts)):
                for found in index.modules.ending(parts[:length]):
                    taken[found].add(parts[length])
    return taken


def _imported(
    index: Index, path: Path, analysis: Analysis, names: set[str]
) -> Iterator[tuple[Things, str]]:
    """What a file imports of those names, and of what."""
    for scope in scopes(analysis.module):
        bound = (each for bindings in scope.bindings.values() for each in bindings)
        for each in (*bound, *scope.stars):
            if isinstance(each, Imported) and each.member in names:
                things = index.resolver.module(each, path)
                yield frozenset(thing for thing in things if thing.path != path), each.member


def _reached(
    index: Index, path: Path, analysis: Analysis, names: set[str]
) -> Iterator[tuple[Things, str]]:
    """What a file reaches of those names by attributes, and of what."""
    for use in analysis.uses:
        chain: list[str] = []
        node: ast.expr = use.node
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if not names.isdisjoint(chain):
            things = index.resolver.expression(node, use.scope, path)
            for attribute in reversed(chain):
                yield things, attribute
                things = index.resolver.attribute(things, attribute)
        parent = use.parents.node
        if isinstance(parent, ast.Call) and use.node in parent.args[:1] and len(parent.args) > 1:
            name = parent.args[1]  # setattr(module, "name", ...)
            if isinstance(name, ast.Constant) and name.value in names:
                yield index.resolver.expression(use.node, use.scope, path), str(name.value)
