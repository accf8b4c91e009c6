"""Pass the new parameter along calls: which functions take it, and which calls pass what.

Every function with uses takes the parameter if it can. Functions in between take it as
well if they lie on a path of calls from one that has a carrier (an object that holds a collection)
to one that needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.carriers import PARAMETER, Carrier, Carriers, Node, in_order
from megapg.migrate.facts import Call, Everything
from megapg.migrate.migration import How, Root
from megapg.migrate.project import Project
from megapg.upstream.mapping import ANY_GROUP, GROUP_PARAMETERS


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return some nodes, and those that follow them directly or through others."""
    found: set[Node] = set()
    waiting = list(starts)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += following(node)
    return found


@dataclass(frozen=True)
class Edge:
    """A call of a function or class that can take the parameter."""

    path: Path
    call: Call
    callee: Node
    carrier: Carrier  # of the caller


class Threads:
    """The calls of a project that can pass the parameter.

    Args:
        everything: the facts of all files.
        carriers: chooses carriers.
        sources: the files whose calls count; tests are not among them.
        wanted: needed fields of each use, by the node whose parameter serves it.
        thread_from: nodes that take the parameter and pass it on, although nobody passes it yet.

    Attributes:
        taking: the nodes that take the parameter.
        always_passed: those of them that are passed a collection by every call.
    """

    def __init__(
        self,
        everything: Everything,
        carriers: Carriers,
        sources: Collection[Path],
        wanted: Mapping[Node, Sequence[tuple[str, ...]]],
        thread_from: Collection[Node] = (),
    ) -> None:
        self._everything, self._carriers, self._wanted = everything, carriers, wanted
        self._edges = [edge for path in sources for edge in self._edges_of(path)]
        self._calls: dict[Node, list[Edge]] = defaultdict(list)
        self._by_caller: dict[Node | None, list[Edge]] = defaultdict(list)
        for edge in self._edges:
            self._calls[edge.callee].append(edge)
            self._by_caller[edge.carrier.node].append(edge)
        self.taking: set[Node] = self._take(thread_from)
        self.always_passed: set[Node] = self._find_always_passed()
        self._needs = self._find_needs()

    def _edges_of(self, path: Path) -> Iterator[Edge]:
        for call in self._everything[path].calls:
            callee = self._callee(path, call)
            if callee is not None:
                yield Edge(path, call, callee, self._carriers.of(path, call.function, call.where))

    def _callee(self, path: Path, call: Call) -> Node | None:
        carriers = self._carriers
        if call.callee == "super().__init__":
            around = carriers.around(path, call.function)
            of = carriers.class_at(path, around[-1].of_class) if around else None
            return carriers.base_constructor(of) if of is not None else None
        meaning = carriers.meaning(call.callee, path)
        if meaning.path is None or not meaning.local:
            return None
        of = carriers.class_at(meaning.path, meaning.local)
        if of is not None:
            return carriers.constructor(of)
        node = Node(meaning.path, meaning.local)
        return node if carriers.can_take(node) else None

    def _take(self, thread_from: Collection[Node]) -> set[Node]:
        def callers(node: Node) -> Iterator[Node]:
            return (e.carrier.node for e in self._calls[node] if e.carrier.node is not None)

        needing = reached(self._wanted, callers)  # upwards: whoever calls what needs it
        starts = [e.callee for e in self._edges if self._is_real(e.carrier)]
        starts += [*self._wanted, *thread_from]
        return reached(  # downwards: whoever is passed it hands it on
            needing.intersection(starts),
            lambda node: needing.intersection(e.callee for e in self._by_caller[node]),
        )

    @staticmethod
    def _is_real(carrier: Carrier) -> bool:
        return carrier.how in (How.COLLECTION, How.MODEL)

    def passes(self, edge: Edge) -> bool:
        """True if a call passes the parameter."""
        call = edge.call
        if edge.callee not in self.taking or call.where.quotes:
            return False
        if call.keywords & {PARAMETER, *ANY_GROUP} or GROUP_PARAMETERS.keys() & (
            call.keywords | call.passed
        ):  # the caller says which groups
            return False
        return self._is_real(edge.carrier) or edge.carrier.node in self.taking

    def _find_always_passed(self) -> set[Node]:
        passed = {node for node in self.taking if self._calls[node]}

        def is_passed(edge: Edge) -> bool:
            return self.passes(edge) and (
                self._is_real(edge.carrier) or edge.carrier.node in passed
            )

        while unpassed := {n for n in passed if not all(map(is_passed, self._calls[n]))}:
            passed -= unpassed
        return reached(  # a circle of calls passes no collection
            passed.intersection(e.callee for e in self._edges if self._is_real(e.carrier)),
            lambda node: passed.intersection(e.callee for e in self._by_caller[node]),
        )

    def _find_needs(self) -> dict[Node, tuple[str, ...]]:
        needs = {n: [f for each in self._wanted.get(n, ()) for f in each] for n in self.taking}
        changed = True
        while changed:
            changed = False
            for edge in self._edges:
                caller = edge.carrier.node
                if caller in needs and self.passes(edge):
                    more = [f for f in needs[edge.callee] if f not in needs[caller]]
                    needs[caller] += dict.fromkeys(more)
                    changed = changed or bool(more)
        return {node: in_order(fields) for node, fields in needs.items()}

    def passing(self) -> Iterator[tuple[Edge, tuple[str, ...]]]:
        """Yield the calls that pass the parameter, with the fields that the callee needs."""
        for edge in self._edges:
            if self.passes(edge):
                yield edge, self._needs[edge.callee]

    def unpassed(self, node: Node) -> list[Edge]:
        """Return the calls of a node that pass nothing."""
        return [e for e in self._calls[node] if not self.passes(e)]

    def is_root(self, node: Node) -> bool:
        """True if a node is not called, or some call of it passes nothing."""
        return not self._calls[node] or bool(self.unpassed(node))

    def receivers(self, node: Node) -> set[Node]:
        """Return a node, and the functions and classes that get its collection through calls."""
        return reached([node], lambda n: (e.callee for e in self._by_caller[n] if self.passes(e)))


def find_roots(
    project: Project,
    carriers: Carriers,
    threads: Threads,
    by_parameter: Mapping[Node, int],
    alone: Mapping[Node, int],
) -> list[Root]:
    """Return the functions that read the globals, those with most uses first.

    Args:
        project: the files.
        carriers: of the project.
        threads: of the project.
        by_parameter: number of uses that the parameter of a function or class serves.
        alone: number of uses in functions without a carrier.
    """
    roots = []
    for node in threads.taking - threads.always_passed:
        uses = sum(by_parameter.get(n, 0) for n in threads.receivers(node) - threads.always_passed)
        if uses and threads.is_root(node):
            places = [(project.files[e.path], e.call.span.line) for e in threads.unpassed(node)]
            calls = tuple(f"{file}:{line}" for file, line in sorted(places))
            line = _line(carriers, node)
            roots.append(Root(project.files[node.path], line, node.name, True, uses, calls))
    for node, uses in alone.items():
        line = _line(carriers, node)
        roots.append(Root(project.files[node.path], line, node.name, False, uses, ()))
    return sorted(roots, key=lambda each: (-each.uses, each.file, each.line))


def _line(carriers: Carriers, node: Node) -> int:
    init = carriers.function(node.path, f"{node.name}.__init__")
    function = carriers.function(node.path, node.name) or init
    return function.span.line if function is not None else 0
