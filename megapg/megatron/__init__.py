"""The bridge to Megatron-core: its collection, its globals, its versions.

Only this package of megapg uses ``megatron.core.parallel_state``. Other code that needs it (the
demo's comparison run, the tests, the benchmarks) imports it from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapg.megatron import getters
from megapg.megatron.adopting.adopted import Adopted, AdoptedReport, Leftover, adopt
from megapg.megatron.adopting.creations import Recording, record_initialize
from megapg.megatron.arguments import session_arguments
from megapg.megatron.compare import Comparison, Disagreement, compare_with_globals
from megapg.megatron.convert import (
    from_megatron,
    from_parallel_state,
    schedule_collection,
    to_megatron,
)
from megapg.megatron.core import core_version, parallel_state_module
from megapg.megatron.drop_in import destroy_model_parallel, initialize_model_parallel
from megapg.megatron.from_args import session_from_args
from megapg.megatron.fsdp import fsdp_adapter, fsdp_index
from megapg.megatron.grids import from_grid, to_grid
from megapg.megatron.modules import from_modules, to_modules
from megapg.megatron.publish import published
from megapg.megatron.reading.global_groups import GlobalGroups
from megapg.megatron.reading.groups_of import groups_of
from megapg.megatron.reading.resolve import (
    globals_policy,
    resolve,
    resolves,
    was_passed,
)
from megapg.megatron.resharding import for_resharding
from megapg.megatron.watching.contradiction import allow_global_reads
from megapg.megatron.watching.forbid import forbid_global_reads
from megapg.megatron.watching.guard import guard
from megapg.megatron.watching.trace import GlobalRead, Trace, trace_global_reads

# Imported here too, so that every session has the guard.
from megapg.ownership.opening import open_sessions, session

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
    "allow_global_reads",
    "compare_with_globals",
    "core_version",
    "destroy_model_parallel",
    "for_resharding",
    "forbid_global_reads",
    "from_grid",
    "from_megatron",
    "from_modules",
    "from_parallel_state",
    "fsdp_adapter",
    "fsdp_index",
    "getters",
    "globals_policy",
    "groups_of",
    "guard",
    "initialize_model_parallel",
    "open_sessions",
    "parallel_state",
    "published",
    "record_initialize",
    "resolve",
    "resolves",
    "schedule_collection",
    "session",
    "session_arguments",
    "session_from_args",
    "to_grid",
    "to_megatron",
    "to_modules",
    "trace_global_reads",
    "was_passed",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> ModuleType:
        if name == "parallel_state":  # loaded on use: importing it takes seconds
            return parallel_state_module()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
