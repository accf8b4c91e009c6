"""What is taken from a module by others: names that have to stay when nothing in it uses them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.meaning import Things
from megapg.migrate.find.sites import Kind
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.scopes import Imported, scopes


def names_taken(index: Index, released: Mapping[Path, Collection[str]]) -> dict[Path, set[str]]:
    """For each file the names that other files import or reach through it, ``*`` for all. Those in
    strings are apart: :func:`patched_through`.

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
    return taken


def patched_through(index: Index) -> Iterator[tuple[Located, dict[Path, str]]]:
    """The strings that name something of the globals, as ``patch("pkg.mod.mpu")`` does, each with
    the files through which it is reached, and the name that it has there.
    """
    for located in index.located:
        if located.site.kind is Kind.STRING and isinstance(located.node, ast.Constant):
            parts = tuple(str(located.node.value).split("."))
            through = {
                found: parts[length]
                for length in range(1, len(parts))
                for found in index.modules.ending(parts[:length])
            }
            yield located, through


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
