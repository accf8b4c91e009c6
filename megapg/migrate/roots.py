"""Find the functions that read the globals: where to pass a collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megapg.migrate.carriers import Carriers, Node
from megapg.migrate.migration import Root
from megapg.migrate.project import Project
from megapg.migrate.thread import Threads


@dataclass(frozen=True)
class Counts:
    """Numbers of rewritten uses."""

    by_parameter: Mapping[Node, int]  # served by the parameter of a function or class
    alone: Mapping[Node, int]  # in functions without a carrier


def find_roots(
    project: Project, carriers: Carriers, threads: Threads, counts: Counts
) -> list[Root]:
    """Return the functions that read the globals, those with most uses first."""
    roots = []
    for node in threads.taking - threads.fed:
        uses = sum(counts.by_parameter.get(n, 0) for n in threads.behind(node) - threads.fed)
        if uses and threads.is_root(node):
            places = [(project.files[e.path], e.call.span.line) for e in threads.unpassed(node)]
            calls = tuple(f"{file}:{line}" for file, line in sorted(places))
            line = _line(carriers, node)
            roots.append(Root(project.files[node.path], line, node.name, True, uses, calls))
    for node, uses in counts.alone.items():
        line = _line(carriers, node)
        roots.append(Root(project.files[node.path], line, node.name, False, uses, ()))
    return sorted(roots, key=lambda each: (-each.uses, each.file, each.line))


def _line(carriers: Carriers, node: Node) -> int:
    init = carriers.function(node.path, f"{node.name}.__init__")
    function = carriers.function(node.path, node.name) or init
    return function.span.line if function is not None else 0
