"""The bridge to Megatron-core: its collection, its globals, its versions.

Only this package of megapg uses ``megatron.core.parallel_state``. Other code that needs it (the
demo's comparison run, the tests, the benchmarks) imports it from here. Names that are imported
``as`` themselves can still be imported from here. Most of them are public in :mod:`megapg`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapg.megatron import getters
from megapg.megatron.adopting.adopted import Adopted, AdoptedReport, Leftover, adopt
from megapg.megatron.adopting.creations import Recording, record_initialize
from megapg.megatron.arguments import session_arguments
from megapg.megatron.compare import Comparison, Disagreement, compare_with_globals
from megapg.megatron.convert import from_megatron as from_megatron
from megapg.megatron.convert import from_parallel_state as from_parallel_state
from megapg.megatron.convert import schedule_collection
from megapg.megatron.convert import to_megatron as to_megatron
from megapg.megatron.core import core_version as core_version
from megapg.megatron.core import parallel_state_module
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
from megapg.megatron.watching.trace import GlobalRead, Trace, trace_global_reads

# Imported here too, so that every session has the guard.
from megapg.ownership.opening import open_sessions as open_sessions
from megapg.ownership.opening import session as session

if TYPE_CHECKING:
    from types import ModuleType

    parallel_state: ModuleType

__all__ = [
    "Adopted",
    "AdoptedReport",
    "Comparison",
    "Disagreement",
    "GlobalGroups",
    "GlobalRead",
    "Leftover",
    "Recording",
    "Trace",
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

    def __getattr__(name: str) -> ModuleType:
        if name == "parallel_state":  # loaded on use: importing it takes seconds
            return parallel_state_module()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
