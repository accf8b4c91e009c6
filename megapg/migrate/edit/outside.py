"""What is taken from a module by others: names that have to stay when nothing in it uses them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.meaning import GLOBALS, Things
from megapg.migrate.find.sites import Kind
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.scopes import Imported, scopes


def names_taken(
    index: Index, released: Mapping[Path, Collection[str]], apart: Collection[Imported]
) -> dict[Path, set[str]]:
    """For each file the names that other files import or reach through it, ``*`` for all. Those
    that are patched are apart: :func:`patched_through`.

    Args:
        index: the project.
        released: the files that are asked about, with the names. Other files and names may be
            left out of the answer.
        apart: imports that don't count.
    """
    taken: dict[Path, set[str]] = defaultdict(set)
    names = {"*"}.union(*released.values())
    owners = {owner for _, owner, _ in patched_through(index)}
    for path, analysis in index.analyses():
        for things, name in (
            *_imported(index, path, analysis, names, apart),
            *_reached(index, path, analysis, names, owners),
        ):
            for thing in things:
                if thing.kind == "file" and thing.path is not None:
                    taken[thing.path].add(name)
    return taken


def patched_through(index: Index) -> Iterator[tuple[Located, ast.expr, dict[Path, str]]]:
    """What patches something of the globals, as ``patch("pkg.mod.mpu.get")`` and
    ``setattr(mod.mpu, "get", ...)`` do: each with the string, or ``mod.mpu``, and the files
    through which it is reached with the name that it has there.
    """
    for located in index.located:
        owner = _owner(index, located)
        if owner is not None:
            things = index.resolver.expression(owner.value, located.use.scope, located.path)
            through = {each.path: owner.attr for each in things if each.path is not None}
            yield located, owner, through
        elif located.site.kind is Kind.STRING and isinstance(located.node, ast.Constant):
            parts = tuple(str(located.node.value).split("."))
            through = {
                found: parts[length]
                for length in range(1, len(parts))
                for found in index.modules.ending(parts[:length])
            }
            yield located, located.node, through


def _owner(index: Index, located: Located) -> ast.Attribute | None:
    """``mod.mpu`` of ``setattr(mod.mpu, "get", ...)``, where that is the globals."""
    site, node = located.site, located.node
    if site.kind is not Kind.PATCHED or not site.name or not isinstance(node, ast.Call):
        return None
    owner = node.args[0]
    things = index.resolver.expression(owner, located.use.scope, located.path)
    return owner if isinstance(owner, ast.Attribute) and things == {GLOBALS} else None


def imported_through(
    index: Index, released: Mapping[Path, Collection[str]]
) -> Iterator[tuple[Path, Imported, str, Path]]:
    """The imports at the top of tests, ``from mod import mpu``, that get the globals from a file
    that is asked about: in which file, what, as which name, and from where.
    """
    names = set().union(*released.values())
    for path, analysis in index.analyses():
        if not index.modules.is_test(path):
            continue
        for name, (at, *others) in analysis.module.bindings.items():
            if isinstance(at, Imported) and at.member in names and not others:
                of = index.resolver.module(at, path)
                sources = {each.path for each in of if each.kind == "file"}
                is_globals = index.resolver.name(name, analysis.module, path) == {GLOBALS}
                source = next((each for each in released if {each} == sources), None)
                if is_globals and source is not None:
                    yield path, at, name, source


def _imported(
    index: Index, path: Path, analysis: Analysis, names: set[str], apart: Collection[Imported]
) -> Iterator[tuple[Things, str]]:
    """What a file imports of those names, and of what; but for what is apart."""
    for scope in scopes(analysis.module):
        bound = (each for bindings in scope.bindings.values() for each in bindings)
        for each in (*bound, *scope.stars):
            if isinstance(each, Imported) and each.member in names and each not in apart:
                things = index.resolver.module(each, path)
                yield frozenset(thing for thing in things if thing.path != path), each.member


def _reached(
    index: Index, path: Path, analysis: Analysis, names: set[str], apart: Collection[ast.expr]
) -> Iterator[tuple[Things, str]]:
    """What a file reaches of those names by attributes, and of what; but for what is apart."""
    for use in analysis.uses:
        if use.node in apart:
            continue
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
