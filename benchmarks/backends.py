"""A table of what megapg does with each backend, and its cost for a rank of a large job.

The table shows the decisions of the code with this machine's torch. Nothing is timed, and no group
is made.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

from benchmarks.table import Options, Table
from megapg.communicators.backends import BACKENDS, Backend
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import Recipe, communicators, families
from megapg.errors import UnsupportedOptionError
from megapg.layout import ParallelLayout

_LAYOUT = ParallelLayout(world_size=1024, tp=8, cp=2, pp=8, ep=8)
# A value that each option takes.
_VALUES = {"is_high_priority_stream": True, "net_name": "IB"}
_ON_WORLDS = {
    "never": (("", False),),
    "on a bound WORLD": ((", WORLD not bound to a device", False), (", WORLD bound to one", True)),
    "always": (("", True),),
}


def tables(_: Options) -> list[Table]:
    """Return the table."""
    return [table()]


def table() -> Table:
    """Return a row for each backend, and for each kind of WORLD with a different result."""
    rows = [
        (f"{row.name}{where}", *_made(row, split), _suspended(row), _options(row))
        for row in BACKENDS.values()
        for where, split in _ON_WORLDS[row.split]
    ]
    everyone = sum(len(family.groups) for family in families(_LAYOUT, _recipe(BACKENDS["nccl"])))
    return Table(
        "The backends",
        (
            "backend",
            "who makes a family of groups",
            "calls of a rank",
            "its communicators",
            "suspended",
            "options",
        ),
        tuple(rows),
        (
            f"Counts are those of rank 0 of {_LAYOUT.world_size:,} (tp=8 cp=2 pp=8 ep=8); "
            f"`new_group` on every rank for every communicator would take {everyone:,} calls. "
            '"Suspended" is the reason why a communicator can\'t be suspended; megapg re-creates '
            "its groups instead.",
        ),
    )


def _recipe(row: Backend) -> Recipe:
    return Recipe(row.name, row.lanes, {}, frozenset(), all_gather_groups=False)


def _made(row: Backend, split: bool) -> tuple[str, str, str]:
    recipe = _recipe(row)
    if split:
        mine = families(_LAYOUT, recipe)
        held = [each for each in mine if each.of(0) is not None]
        return "all ranks, split from WORLD", str(len(mine)), str(len(held))
    wanted = communicators(_LAYOUT, recipe, 0)
    who = "nobody else is there" if row.alone else "its members"
    who += ", and pairs connect at first use" if row.connects_lazily else ""
    return who, str(len(wanted)), str(len(wanted))


def _suspended(row: Backend) -> str:
    return row.cannot_suspend() or "in place"


def _options(row: Backend) -> str:
    taken = []
    for each in fields(CommunicatorOptions):
        with suppress(UnsupportedOptionError):
            row.options("", CommunicatorOptions(**{each.name: _VALUES.get(each.name, 1)}))
            taken.append(each.name)
    return ", ".join(taken) or "none"
