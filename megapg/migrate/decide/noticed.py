"""What tests will notice of a rewrite of the source: it is told, and never stands in the way."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megapg.migrate.decide.decisions import Decision, Taking
from megapg.migrate.decide.functions import PARAMETER, Functions
from megapg.migrate.find.index import Index, Located
from megapg.migrate.find.meaning import GLOBALS, PARALLEL_STATE, Thing
from megapg.migrate.find.sites import Kind
from megapg.migrate.migration import How, Left, Noticed
from megapg.migrate.python.methods import class_of
from megapg.migrate.python.tree import is_test

_REPLACING = frozenset({Kind.ASSIGNED, Kind.PATCHED, Kind.STRING})


def stand_ins(taking: Taking, index: Index, functions: Functions) -> Iterator[Noticed]:
    """Where tests put something in the place of a function, or a class, that takes the parameter
    now and that the source passes it.
    """
    of_autograd = taking.function.parent if taking.applied is not None else None
    called = of_autograd or class_of(taking.function) or taking.function
    thing = Thing(called.kind, path=taking.path, scope=called)
    for path, line in functions.replaced_by_tests(thing):
        looked = index.look(path)
        if looked is not None:
            what = f"stands in for {called.qualname}, which is passed {PARAMETER} now"
            yield Noticed(looked[0].name, line, what, f"let it take {PARAMETER}=None")


def with_what_is_unheard(left: Iterable[Left], decisions: Sequence[Decision]) -> Iterator[Left]:
    """What is left; of a getter that tests replace it is said which uses of the source may ask
    something else now.
    """
    asking: dict[str, list[Decision]] = {}
    for each in decisions:
        if each.base.how is not How.RESOLVED and not is_test(each.located.site.file):
            asking.setdefault(each.located.site.name, []).append(each)
    for one in left:
        uses = asking.get(one.site.name, ())
        if uses and not one.detail and one.site.kind in _REPLACING and is_test(one.site.file):
            sites = sorted((each.located.site for each in uses), key=lambda each: each.place)
            many = f" and {len(sites) - 1} more" if sites[1:] else ""
            detail = (
                f"{sites[0].place}{many} may ask a model or a collection instead: there pass "
                "megapg.testing.fake_collection(...)"
            )
            one = replace(one, detail=detail)
        yield one


def heard_as(located: Located, index: Index) -> str:
    """What to patch in place of a name that a module of the project imported: what is written
    asks the globals, and never that name. Empty where a patch is heard as it is.
    """
    site, node = located.site, located.node
    if site.kind is Kind.STRING and isinstance(node, ast.Constant):
        module = str(node.value).rpartition(".")[0]
        owners = index.resolver.dotted(module, located.path)
    elif site.kind is Kind.PATCHED and isinstance(node, ast.Call) and site.name:
        owners = index.resolver.expression(node.args[0], located.use.scope, located.path)
    else:
        return ""
    if GLOBALS in owners or not any(each.kind == "file" for each in owners):
        return ""
    return f'patch "{".".join(filter(None, [*PARALLEL_STATE, site.name]))}"'
