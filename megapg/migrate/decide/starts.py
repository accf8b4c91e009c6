"""Where a collection has to be passed for the uses behind it to no longer turn to the globals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator

from megapg.migrate.decide.functions import Functions
from megapg.migrate.decide.references import Reference
from megapg.migrate.decide.threads import Threads
from megapg.migrate.find.index import Index
from megapg.migrate.migration import Start
from megapg.migrate.python.methods import class_of
from megapg.migrate.python.scopes import Scope


def starts(
    index: Index,
    functions: Functions,
    threads: Threads,
    taking: Collection[Scope],
    of_self: Iterable[Scope],
) -> list[Start]:
    """The functions that take the parameter and are passed nothing somewhere, those that serve
    most first.

    Args:
        index: the project.
        functions: of the same index.
        threads: once :meth:`Threads.thread` has run.
        taking: the functions that get the parameter.
        of_self: for each use that finds the collection on ``self``, the constructor that keeps it.
    """
    uses = Counter(each for each, sites in threads.wanting.items() for _ in sites)
    uses.update(of_self)
    behind: dict[Scope, set[Scope]] = defaultdict(set)
    for function in taking:
        for edge in threads.edges.get(function, ()):
            caller = edge.caller or edge.keeper
            if caller in taking and caller is not None:
                behind[caller].add(function)
    tops = {}
    for function in taking:
        if index.modules.is_test(threads.paths[function]):
            continue
        known = functions.references.of(function, threads.paths[function])
        bare = list(_bare(known, threads, function, taking))
        if bare or not known:
            tops[function] = bare
    reached_from: dict[Scope, set[Scope]] = defaultdict(set)
    for top in tops:
        for function in _reached(top, behind):
            reached_from[function].add(top)
    serves = Counter[Scope]()
    for function, those in reached_from.items():
        if len(those) == 1:  # else one of them alone would end nothing
            serves[next(iter(those))] += uses[function]
    found = (
        start
        for top, count in serves.items()
        if count and (start := _start(index, threads, top, tops[top], count))
    )
    return sorted(found, key=lambda start: (-start.serves, start.file, start.line))


def _bare(
    known: Iterable[Reference], threads: Threads, function: Scope, taking: Collection[Scope]
) -> Iterator[Reference]:
    """The places that pass nothing."""
    passing = {
        id(edge.reference)
        for edge in threads.edges.get(function, ())
        if edge.caller is None or edge.caller in taking
    }
    return (each for each in known if id(each) not in passing)


def _reached(top: Scope, behind: dict[Scope, set[Scope]]) -> set[Scope]:
    """The function and those that it passes on to."""
    found, waiting = {top}, [top]
    while waiting:
        new = behind.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _start(
    index: Index, threads: Threads, top: Scope, bare: Iterable[Reference], serves: int
) -> Start | None:
    looked = index.look(threads.paths[top])
    if looked is None:
        return None
    places = [f"{at[0].name}:{each.node.lineno}" for each in bare if (at := index.look(each.path))]
    name = (class_of(top) or top).qualname
    line = getattr(top.node, "lineno", 0)
    return Start(looked[0].name, line, name, tuple(sorted(places)), serves)
