"""To which functions nobody in a project passes a collection, though they can take one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from megapg.migrate.decide.threads import Edge, Threads
from megapg.migrate.find.index import Index
from megapg.migrate.python.methods import class_of, self_of
from megapg.migrate.python.scopes import Scope


def passed_to_nobody(threads: Threads, taking: Collection[Scope], index: Index) -> set[Scope]:
    """The functions of the source that get the parameter, and to which no caller in the source has
    anything to pass, be it by way of others. What is to be threaded from is passed one by hand.
    """
    by_hand = index.config.thread_from
    waiting = [each for each in taking if (class_of(each) or each).qualname in by_hand]
    behind: dict[Scope, list[Scope]] = defaultdict(list)
    for function in taking:
        for edge in threads.edges[function]:
            if index.modules.is_test(edge.reference.path):
                continue
            caller = _passing_on(edge, threads)
            if caller is None:
                waiting.append(function)
            else:
                behind[caller].append(function)
    passed: set[Scope] = set()
    while waiting:
        each = waiting.pop()
        if each not in passed:
            passed.add(each)
            waiting += behind[each]
    return {
        each
        for each in taking
        if each not in passed and not index.modules.is_test(threads.paths[each])
    }


def _passing_on(edge: Edge, threads: Threads) -> Scope | None:
    """The function, or the constructor of the object, that has to be passed a collection before a
    call can pass it on; None where something else has it.
    """
    unit = edge.reference.use.scope.unit
    of_object = unit is not None and edge.supply.expression == self_of(unit)
    kept_by = threads.keeper(unit, edge.reference.path) if of_object else None
    return edge.caller or edge.keeper or kept_by
