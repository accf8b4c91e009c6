"""What is asked of the globals behind a call, and what the report says to write instead."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megapg.layout import FIELDS
from megapg.migrate.edit.absent import lines_in_place_of
from megapg.migrate.edit.called import GETTING_A_SCHEDULE
from megapg.migrate.edit.lacking import OF_GROUPS, none_at_first
from megapg.migrate.edit.mixing import GLOBALS, PASSED, Asking, TextOfFile
from megapg.migrate.find.axes import axes_of
from megapg.migrate.migration import Callee
from megapg.migrate.python.methods import class_of, parameters, self_of
from megapg.migrate.python.scopes import Scope
from megapg.upstream.mapping import COLLECTION_NAMES, GROUP_PARAMETERS

SENDING = "p2p_communicator"
"""The parameter of a schedule for who sends."""


@dataclass(frozen=True, eq=False)
class Called:
    """A function that a call calls, or that stands behind it."""

    function: Scope
    path: Path
    left_out: frozenset[str]  # the parameters that it is not passed
    handed_none: str = ""  # the class of its object, where that was handed no collection

    @property
    def key(self) -> tuple[Scope, frozenset[str]]:
        """By which it is told from the same function, called with other parameters."""
        return self.function, self.left_out | {self.handed_none}


@dataclass(frozen=True)
class Asked:
    """What is asked of the globals behind a call."""

    axes: frozenset[str]
    what: str
    place: str
    unless: str = ""  # the parameter that would have been asked, had it been passed
    applied: str = ""  # the autograd function that asks, or has it asked
    of: str = ""  # the class whose object is asked, and was handed no collection
    first: str = ""  # on the way there that takes no collection
    outside: str = ""  # what to do about a function outside of the project
    sends: bool = False  # whether that is a schedule, with a communicator beside its collection


SCHEDULE = Asked(frozenset({"pp"}), "pp", "megatron/core/pipeline_parallel/schedules.py")
"""Of the schedule that Megatron-core gives."""


def of_globals(asked: Sequence[Asking], called: Called, file: str) -> Iterator[Asked]:
    """What a function asks of the globals, as it is called."""
    if not asked:
        return
    named = {each.arg for each in parameters(called.function.node)}
    instead = {}
    if any(each.carrier == GLOBALS for each in asked):
        of_groups = named & OF_GROUPS | none_at_first(called.function)
        for name in sorted(of_groups - {*COLLECTION_NAMES}):
            instead[name] = lines_in_place_of(called.function, name)
    for each in asked:
        axes, place = axes_of(each.what), f"{file}:{each.line}"
        if each.by_core or not axes:
            continue
        if each.carrier in COLLECTION_NAMES and each.carrier in named & called.left_out:
            yield Asked(axes, each.what, place, each.carrier, sends=SENDING in named)
        elif called.handed_none and each.carrier == self_of(called.function):
            yield Asked(axes, each.what, place, of=called.handed_none)
        elif each.carrier == GLOBALS:
            passed = [name for name, lines in instead.items() if each.line in lines]
            if not passed or called.left_out & {*passed}:
                of_it = (name for name in passed if each.what in GROUP_PARAMETERS.get(name, ()))
                groups = (name for name in passed if name in OF_GROUPS)
                yield Asked(axes, each.what, place, next(iter([*of_it, *groups]), ""))


def asked_outside(
    call: ast.Call,
    unit: Scope,
    text: TextOfFile,
    versions: Collection[int],
    behind: Called | None = None,
) -> list[tuple[str, Asked]]:
    """What a call has asked by a function outside of the project, and that one's name; be it a call
    behind another one.
    """
    named = (each.arg for each in unit.nodes if isinstance(each, ast.keyword))
    if text.names.gets_a_schedule(call) and SENDING not in named:
        return [(GETTING_A_SCHEDULE, SCHEDULE)]
    found = text.names.asks_outside(call, behind.left_out if behind else ())
    if found is None:
        return []
    name, asking, unless = found
    argument, field = asking.instead, asking.field
    instead = "call {1} within megapg.megatron.published({2})"
    if argument is not None and all(each >= argument.since for each in versions):
        given = f".{field}" if argument.name.endswith("group") else f'.rank("{field}")'
        instead = "" if behind else f"pass it {argument.name}={{0}}{given}"
    place = f"{asking.packages[0]} ({name})"
    return [(name, Asked(axes_of(field), field, place, unless, outside=instead))]


def by_way_of(asked: list[Asked], applied: str, first: str) -> list[Asked]:
    """What is asked behind a method of an autograd function, or behind one without a collection."""
    return [
        replace(each, applied=applied or each.applied, first=first or each.first) for each in asked
    ]


def name_of(function: Scope) -> str:
    """Of a constructor that of its class."""
    return (class_of(function) or function).qualname


def reported(
    file: str, call: ast.Call, unit: Scope, own: Mapping[str, str], name: str, found: Asked
) -> Callee:
    carrier = own[min(found.axes & own.keys() or own.keys())]
    of_groups = GROUP_PARAMETERS.get(found.unless, ())
    field = found.what if found.what in of_groups else next(iter(of_groups), found.what)
    fields = f', "{field}"' if field in FIELDS else ""
    is_being_made = class_of(unit) is not None and carrier == self_of(unit)  # and carries nothing
    given = PASSED if is_being_made and PASSED in unit.bindings else carrier
    whole = given if given in COLLECTION_NAMES else f"megapg.groups_of({given})"
    written = given if given in COLLECTION_NAMES else f"megapg.groups_of({given}{fields})"
    if found is SCHEDULE or (found.sends and found.unless):
        it = "it" if found.unless else "it pp_size= and vp_size=, and what it gives"
        instead = (
            f"pass {it} {PASSED}=megapg.megatron.schedule_collection({whole}), "
            f"and where there are stages the {SENDING}= of its pp"
        )
    elif found.unless in COLLECTION_NAMES:
        instead = f"pass it {found.unless}={written}"
    elif found.of:
        instead = f"pass {found.of} a collection where it is made, such as {written}"
    elif found.unless:
        instead = f"pass it {found.unless}={written}.{field}"
    elif found.outside:
        instead = found.outside.format(written, name, whole)
    elif found.applied:
        instead = (
            f"have {found.applied}.forward take the group as its last argument, and keep it on ctx "
            "for backward, which returns one more None, also where it is called by hand; pass it "
            f"from {written}"
        )
    else:
        other = found.first not in ("", name)
        it, way = (found.first, f" by way of {name}") if other else ("it", "")
        instead = f"have {it} take {PASSED}, hand it on to there, and pass it {written}{way}"
    return Callee(file, call.lineno, unit.qualname, carrier, name, found.what, found.place, instead)
