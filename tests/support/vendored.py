"""The module that ``megapg migrate --runtime vendored`` writes, with every function."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType

from megapg.megatron import getters
from megapg.migrate.runtime import text_of
from megapg.upstream.mapping import OF_SEVERAL_PIPELINES

# A project does not get these: for code that is changed by hand, and how megapg holds its buffers.
OWN = {"MemoryBuffer", "owners_buffer", "shares_globals_buffer", *OF_SEVERAL_PIPELINES.values()}
EVERYTHING = [*(name for name in getters.__all__ if name not in OWN), "groups_of"]


@cache
def copied() -> ModuleType:
    """Return the module."""
    module = ModuleType("copied_process_groups")
    sys.modules[module.__name__] = module  # functions in it are pickled by name
    exec(compile(text_of(EVERYTHING), "copied_process_groups.py", "exec"), vars(module))
    return module
