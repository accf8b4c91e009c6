"""The bridge to Megatron-core: its collection, its globals, its versions.

Only this package of megapg uses ``megatron.core.parallel_state``. Other code that needs it (the
demo's comparison run, the tests, the benchmarks) imports it from here. Names that are imported
``as`` themselves can still be imported from here. Most of them are public in :mod:`megapg`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Every session has the guard: this one module must be there before the first opens.
from megapg.megatron.watching import guard as _guard  # noqa: F401

if TYPE_CHECKING:
    from types import ModuleType

    from megapg.megatron import getters
    from megapg.megatron.adopting.adopted import adopt
    from megapg.megatron.adopting.creations import record_initialize
    from megapg.megatron.arguments import session_arguments
    from megapg.megatron.compare import compare_with_globals
    from megapg.megatron.convert import from_megatron as from_megatron
    from megapg.megatron.convert import from_parallel_state as from_parallel_state
    from megapg.megatron.convert import schedule_collection
    from megapg.megatron.convert import to_megatron as to_megatron
    from megapg.megatron.core import core_version as core_version
    from megapg.megatron.drop_in import destroy_model_parallel, initialize_model_parallel
    from megapg.megatron.embeddings import check_embeddings
    from megapg.megatron.from_args import session_from_args
    from megapg.megatron.fsdp import fsdp_adapter, fsdp_index
    from megapg.megatron.grids import from_grid, to_grid
    from megapg.megatron.modules import from_modules, to_modules
    from megapg.megatron.publish import published as published
    from megapg.megatron.reading.global_groups import GlobalGroups
    from megapg.megatron.reading.groups_of import groups_of as groups_of
    from megapg.megatron.reading.resolve import globals_policy, resolves
    from megapg.megatron.reading.resolve import resolve as resolve
    from megapg.megatron.reading.resolve import was_passed as was_passed
    from megapg.megatron.resharding import for_resharding, forget_resharding
    from megapg.megatron.watching.contradiction import allow_global_reads as allow_global_reads
    from megapg.megatron.watching.forbid import forbid_global_reads
    from megapg.megatron.watching.guard import guard as guard
    from megapg.megatron.watching.trace import trace_global_reads
    from megapg.ownership.opening import open_sessions as open_sessions
    from megapg.ownership.opening import session as session

    parallel_state: ModuleType

# Loaded at first use: a session needs few of them.
_HOMES = {
    "GlobalGroups": "megapg.megatron.reading.global_groups",
    "adopt": "megapg.megatron.adopting.adopted",
    "allow_global_reads": "megapg.megatron.watching.contradiction",
    "check_embeddings": "megapg.megatron.embeddings",
    "compare_with_globals": "megapg.megatron.compare",
    "core_version": "megapg.megatron.core",
    "destroy_model_parallel": "megapg.megatron.drop_in",
    "for_resharding": "megapg.megatron.resharding",
    "forbid_global_reads": "megapg.megatron.watching.forbid",
    "forget_resharding": "megapg.megatron.resharding",
    "from_grid": "megapg.megatron.grids",
    "from_megatron": "megapg.megatron.convert",
    "from_modules": "megapg.megatron.modules",
    "from_parallel_state": "megapg.megatron.convert",
    "fsdp_adapter": "megapg.megatron.fsdp",
    "fsdp_index": "megapg.megatron.fsdp",
    "globals_policy": "megapg.megatron.reading.resolve",
    "groups_of": "megapg.megatron.reading.groups_of",
    "guard": "megapg.megatron.watching.guard",
    "initialize_model_parallel": "megapg.megatron.drop_in",
    "open_sessions": "megapg.ownership.opening",
    "parallel_state_module": "megapg.megatron.core",
    "published": "megapg.megatron.publish",
    "record_initialize": "megapg.megatron.adopting.creations",
    "resolve": "megapg.megatron.reading.resolve",
    "resolves": "megapg.megatron.reading.resolve",
    "schedule_collection": "megapg.megatron.convert",
    "session": "megapg.ownership.opening",
    "session_arguments": "megapg.megatron.arguments",
    "session_from_args": "megapg.megatron.from_args",
    "to_grid": "megapg.megatron.grids",
    "to_megatron": "megapg.megatron.convert",
    "to_modules": "megapg.megatron.modules",
    "trace_global_reads": "megapg.megatron.watching.trace",
    "was_passed": "megapg.megatron.reading.resolve",
}

__all__ = [
    "GlobalGroups",
    "adopt",
    "check_embeddings",
    "compare_with_globals",
    "destroy_model_parallel",
    "for_resharding",
    "forbid_global_reads",
    "forget_resharding",
    "from_grid",
    "from_modules",
    "fsdp_adapter",
    "fsdp_index",
    "getters",
    "globals_policy",
    "initialize_model_parallel",
    "parallel_state",
    "record_initialize",
    "resolves",
    "schedule_collection",
    "session_arguments",
    "session_from_args",
    "to_grid",
    "to_modules",
    "trace_global_reads",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name == "parallel_state":  # importing it takes seconds
            from megapg.megatron.core import parallel_state_module

            return parallel_state_module()
        if name == "getters":
            return importlib.import_module("megapg.megatron.getters")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES, "getters", "parallel_state"})
