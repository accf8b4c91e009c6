"""The decorator of a getter that Megatron-core has: the globals answer it themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar, cast

from megapg.collection import ProcessGroupCollection
from megapg.layout import GroupName
from megapg.megatron.getters.asking import ask, can_be_asked, reads_globals, refuse_remat

F = TypeVar("F", bound="Callable[..., object]")


def asks(
    name: str, *, refused_with: GroupName | None = None, why: Callable[..., object] | None = None
) -> Callable[[F], F]:
    """Make a function call the getter ``name`` if its collection is the globals.

    Its other arguments are keywords. Those that the caller leaves out or passes as None get the
    getter's default. If this core has no such getter, or it does not take an argument of the
    caller, the function itself runs. If ``refused_with`` names a field of rematerialisation, its
    group must have one rank. If the getter fails, ``why`` is called with the same arguments, to
    raise a better error.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def answer(pg: ProcessGroupCollection, **kwargs: object) -> object:
            if refused_with:
                refuse_remat(pg, refused_with)
            given = {key: value for key, value in kwargs.items() if value is not None}
            if not reads_globals(pg) or not can_be_asked(name, given):
                return function(pg, **kwargs)
            try:
                return ask(pg, name, **given)
            except AssertionError:
                if why is not None:
                    why(pg, **kwargs)
                raise

        return cast(F, answer)

    return decorate
