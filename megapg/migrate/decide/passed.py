"""What comes of the threads: to whom every caller passes a collection, what is read of it, and
which constructors ask their object for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from megapg.migrate.decide.decisions import GLOBALS, Passing, Plan
from megapg.migrate.decide.facts import Facts
from megapg.migrate.decide.functions import Functions
from megapg.migrate.decide.threads import Threads
from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry, keeps_its_model
from megapg.migrate.python.flow import runs_before, statements_around
from megapg.migrate.python.methods import class_of, self_of
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


def ask_the_object(plan: Plan, facts: Facts, taking: Collection[Scope], index: Index) -> None:
    """Have constructors ask their object in place of the model that it has by then, and behind what
    they were passed.
    """
    for at, each in enumerate(plan.decisions):
        unit, use, path = each.located.use.scope.unit, each.located.use, each.located.path
        if unit is None or unit not in facts.of_passed or unit not in taking:
            continue
        above = ancestry(unit.parent, path, index.resolver) if unit.parent is not None else ()
        statement = keeps_its_model([one for one in above if isinstance(one, Scope)])
        around = statements_around(use.parents, unit.node)
        of_model = each.base.form == "groups_of" and not each.base.passed_first
        if of_model and statement is not None and runs_before(statement, around, unit.node):
            base = replace(each.base, expression=self_of(unit), made_here=False, reads=())
            plan.decisions[at] = replace(each, base=base)


def globals_passed(
    plan: Plan,
    facts: Facts,
    threads: Threads,
    functions: Functions,
    needs: Mapping[Scope, tuple[str, ...]],
) -> list[Passing]:
    """The calls by which functions that the globals serve pass these to functions that get the
    parameter, and pass it to nobody: one look-up then serves both.
    """
    asking = {e.located.use.scope.unit for e in plan.decisions if e.base is GLOBALS}
    asking &= facts.parted.keys() - facts.tainted
    passed = {id(each.reference.call) for each in plan.passing}
    handing = {each.caller for edges in threads.edges.values() for each in edges}
    found: list[Passing] = []
    for function, fields in needs.items():
        if class_of(function) is not None or function in handing or function not in threads.wanting:
            continue
        path = threads.paths[function]
        for each in functions.references.of(function, path):
            unit, call = each.use.scope.unit, each.call
            if call is None or unit not in asking or each.use.scope is not unit:
                continue
            if id(call) not in passed and threads.may_pass(each):
                found.append(Passing(each, path, GLOBALS, fields))
    return found
