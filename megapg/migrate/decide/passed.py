"""What comes of the threads: to whom every caller passes a collection, and what is read of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megapg.migrate.decide.functions import Functions
from megapg.migrate.decide.threads import Threads
from megapg.migrate.python.scopes import Scope
from megapg.upstream.mapping import Replacement


def all_fed(threads: Threads, functions: Functions, taking: Collection[Scope]) -> set[Scope]:
    """The functions to which every caller in the project passes a collection."""
    callers = {each: _callers_of(each, threads, functions) for each in taking}
    found = {function for function, known in callers.items() if known is not None}
    behind: dict[Scope, list[Scope]] = {}
    for function in found:
        for caller in callers[function] or ():
            behind.setdefault(caller, []).append(function)
    waiting = [caller for caller in behind if caller not in found]
    while waiting:
        unfed = [each for each in behind.get(waiting.pop(), ()) if each in found]
        found -= set(unfed)
        waiting += unfed
    return found


def _callers_of(function: Scope, threads: Threads, functions: Functions) -> set[Scope] | None:
    """The functions that pass on what they are passed; None where somebody passes nothing, or
    what may be nothing.
    """
    edges = {id(edge.reference): edge for edge in threads.edges[function]}
    references = functions.references.of(function, threads.paths[function])
    if not references or not functions.references.all_seen(function):
        return None
    passing = [edges.get(id(reference)) for reference in references]
    if any(edge is None or edge.supply.optional for edge in passing):
        return None
    return {edge.caller for edge in passing if edge is not None and edge.caller is not None}


def fields_read(threads: Threads, taking: Collection[Scope]) -> Mapping[Scope, tuple[str, ...]]:
    """The fields that are read in each function and behind it."""
    read = {each: set(threads.of_methods.get(each, ())) for each in taking}
    for function, sites in threads.wanting.items():
        for located in sites if function in read else ():
            if isinstance(located.site.answer, Replacement):
                read[function] |= set(located.site.answer.needs)
    waiting = list(taking)
    while waiting:
        function = waiting.pop()
        for edge in threads.edges.get(function, ()):
            caller = edge.caller or edge.keeper or edge.constructor
            unit = edge.reference.use.scope.unit
            if caller is None or unit is None or caller.parent is not unit.parent:
                continue  # a base is not asked for what only some classes made of it read
            if caller in read and not read[function] <= read[caller]:
                read[caller] |= read[function]
                waiting.append(caller)
    return {function: tuple(sorted(fields)) for function, fields in read.items()}
