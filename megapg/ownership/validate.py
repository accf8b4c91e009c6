"""Check the arguments of a session before any rank waits, and describe them for comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from datetime import timedelta

import torch

from megapg import torch_private
from megapg.communicators.backends import backend_for
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import ALL_GATHER_FIELDS, COMPANION, Recipe, created_fields
from megapg.communicators.world import World
from megapg.errors import SessionError, UnknownFieldError, UnsupportedOptionError
from megapg.layout import FIELDS, ParallelLayout


def check_waits(
    timeout: float, collective_timeout: timedelta | Mapping[str, timedelta] | None = None
) -> None:
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not number or not 0 < timeout < math.inf:  # excludes NaN too, which no time exceeds
        raise SessionError(
            f"timeout={timeout!r}: give the seconds to wait, a finite number above 0."
        )
    if collective_timeout is None:
        return
    by_field = collective_timeout if isinstance(collective_timeout, Mapping) else None
    given = {"": collective_timeout} if by_field is None else by_field
    for field, value in given.items():
        if not isinstance(value, timedelta) or value <= timedelta(0):
            where = (
                "collective_timeout=" if by_field is None else f"collective_timeout: {field} is "
            )
            raise SessionError(
                f"{where}{value!r}: give a datetime.timedelta above 0, such as "
                "timedelta(minutes=10), or a mapping from field to timedelta."
            )


def check_kinds(
    name: str,
    options: Mapping[str, CommunicatorOptions],
    dedicated: Collection[str],
    gloo: Collection[str],
    sizes: Collection[str],
    known_sizes: Collection[str],
) -> None:
    if not isinstance(name, str) or not name:
        raise SessionError(f"name={name!r}: give the session a name, or leave it out.")
    for argument, fields in (("dedicated", dedicated), ("gloo", gloo)):
        if isinstance(fields, str):
            raise SessionError(f"{argument}={fields!r}: give the fields in a tuple, ({fields!r},).")
    for field, value in options.items():
        if not isinstance(value, CommunicatorOptions):
            raise UnsupportedOptionError(
                f"options: {field} is {value!r}; give megapg.CommunicatorOptions(max_ctas=8)."
            )
    if unknown := set(sizes) - set(known_sizes):
        raise SessionError(
            f"session() has no {', '.join(sorted(unknown))}; the sizes are "
            f"{', '.join(known_sizes)}. The names of initialize_model_parallel go "
            "through megapg.session(**megapg.megatron.session_arguments(...))."
        )


def check_recipe(recipe: Recipe, world: World, layout: ParallelLayout) -> None:
    made = {field.partition(".")[0] for field in created_fields(layout, recipe)}
    for field in (*recipe.options, *recipe.dedicated, *recipe.gloo):
        if field not in FIELDS:
            raise UnknownFieldError.of(field, FIELDS)
        if field not in made:
            raise UnsupportedOptionError(_not_made(field))
    known = {*made, *created_fields(layout, recipe)} - {COMPANION.removesuffix(".")}
    for field in recipe.timeouts:
        if field not in known and field not in FIELDS:
            raise UnknownFieldError(
                f"collective_timeout: {field!r} is no field of this session; the fields are "
                f"{', '.join(sorted(known))}."
            )
        if field not in known:
            raise UnsupportedOptionError(f"collective_timeout: {_not_made(field)}")
    if "hcp" in recipe.gloo:
        raise UnsupportedOptionError("gloo: hcp is several groups, which have no companions.")
    for field, options in recipe.options.items():  # raises before any rank waits
        backend_for(recipe.backend).options(field, options)
    outside = [rank for rank in layout.ranks if rank >= world.size]
    if outside:
        raise SessionError(
            f"the layout has the ranks {outside}, but WORLD has {world.size} ranks, from 0."
        )
    if world.rank not in layout.ranks:
        raise SessionError(
            f"rank {world.rank} is not in the layout's ranks {list(layout.ranks)}; only those "
            "ranks open this session."
        )
    if not world.splits(recipe.backend):
        return
    if len(layout.ranks) != world.size:
        raise UnsupportedOptionError(
            "ranks=: WORLD is bound to a device (init_process_group(device_id=...)) or on "
            "torchcomms, so groups are split from it by all of its ranks. Initialise WORLD without "
            "either to open a session on some of them."
        )
    ascending = all(a < b for a, b in itertools.pairwise(layout.ranks))
    if not ascending and not torch_private.splits_in_order():
        raise UnsupportedOptionError(
            f"ranks={list(layout.ranks)}: WORLD is bound to a device "
            "(init_process_group(device_id=...)) or on torchcomms, so groups are split from it, "
            f"and torch {torch.__version__} sorts the ranks of such groups; 2.14 without "
            "torchcomms keeps their order. Install that, initialise WORLD without either, or give "
            "the ranks in ascending order."
        )


def _not_made(field: str) -> str:
    needs = "all_gather_groups=True" if field in ALL_GATHER_FIELDS else "another layout"
    return f"{field} is not made here; that takes {needs}."


def settings(
    layout: ParallelLayout, recipe: Recipe, collective_timeout: timedelta
) -> dict[str, str]:
    """Return all settings that must be equal on every rank, as text, for the rendezvous."""
    return {
        **layout.describe(),
        "backend": recipe.backend,
        "options": str({field: o.given() for field, o in sorted(recipe.options.items())}),
        "dedicated": str(sorted(recipe.dedicated)),
        "all_gather_groups": str(recipe.all_gather_groups),
        "gloo": str(sorted(recipe.gloo)),
        "connects_lazily": str(backend_for(recipe.backend).connects_lazily),
        "collective_timeout": str(collective_timeout),
        **{f"collective_timeout of {f}": str(t) for f, t in sorted(recipe.timeouts.items())},
    }
