"""Collections from and to Megatron-core's ``MultiModuleProcessGroupCollection``.

No group is made. A pipeline of several modules, such as an image encoder and a language model, has
a layout for each module. Megatron-core's schedule takes the collections of the modules that this
rank is in.
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
    """Return the ``pg_collection`` of Megatron-core's schedule for a pipeline of several modules.

    The call is the same on all ranks: a module on other ranks has None here, and is left out. The
    collections are used without a copy, so the sessions own the groups, and
    :meth:`megapg.Session.rebind` replaces them.

    Args:
        modules: all modules by name, each with its collection on this rank, or None.
        language_model: the module with the loss. On ranks outside of it, Megatron-core gets None
            for it.

    Raises:
        LayoutError: this rank is in no module, or the language model is not among them.
        StaleGroupError: the session of a collection has ended.
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
    """Return the modules that this rank is in, each with its groups: borrowed, never closed by
    megapg.

    A collection from :func:`to_modules` is returned as the same object. One of Megatron-core's own
    class is converted with :func:`~megapg.megatron.from_megatron`.

    Raises:
        ForeignGroupError: a field holds something that is no live group of this rank.
    """
    return {
        name: each if isinstance(each, ProcessGroupCollection) else from_megatron(each)
        for name, each in collections.items()
    }
