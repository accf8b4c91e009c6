"""Collections from and to Megatron-core's ``MultiModuleProcessGroupCollection``; no group is made.

A pipeline of several modules, as an image encoder in front of a language model, has a layout for
each of them. Megatron-core's schedule is passed the collections of those that this rank is in.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapg.collection import ProcessGroupCollection
from megapg.errors import LayoutError
from megapg.megatron.convert import from_megatron
from megapg.megatron.core import ModuleCollections, module_collections_class


def to_modules(
    modules: Mapping[str, ProcessGroupCollection | None], language_model: str | None = None
) -> ModuleCollections:
    """What Megatron-core's schedule takes as ``pg_collection`` for a pipeline of several modules.

    The call is the same on all ranks: a module on other ranks has None here, and is left out. The
    collections go in as they are, so the groups stay the sessions', and
    :meth:`megapg.Session.rebind` puts new ones in.

    Args:
        modules: all modules by name, each with its collection on this rank, or None.
        language_model: which of them has the loss; where this rank is outside of it Megatron-core
            hears that there is none here.

    Raises:
        LayoutError: this rank is in no module, or the language model is not among them.
        StaleGroupError: the session behind a collection has ended.
        UnsupportedVersionError: this Megatron-core has no such pipelines.
    """
    made = module_collections_class()
    here = {name: pg for name, pg in modules.items() if pg is not None}
    named = ", ".join(modules) or "none"
    if language_model is not None and language_model not in modules:
        raise LayoutError(
            f"to_modules(): the language model {language_model!r} is not among the modules "
            f"({named}). Name every module on every rank, with None for one on other ranks."
        )
    if not here:
        raise LayoutError(
            f"to_modules(): this rank is in no module ({named}), and Megatron-core has no "
            "collection of none. Leave the schedule out on this rank, or give it a module."
        )
    for pg in here.values():
        pg.require(owner="to_modules()")
    return made(here, language_model if language_model in here else None)


def from_modules(collections: ModuleCollections) -> dict[str, ProcessGroupCollection]:
    """The modules that this rank is in, each with its groups: borrowed, never closed by megapg.

    A collection that :func:`to_modules` put in comes out as the same object; one of Megatron-core's
    own class as :func:`~megapg.megatron.from_megatron` of it.

    Raises:
        ForeignGroupError: a field holds something that is no live group of this rank.
    """
    return {
        name: each if isinstance(each, ProcessGroupCollection) else from_megatron(each)
        for name, each in collections.items()
    }
