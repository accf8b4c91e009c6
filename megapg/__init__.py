"""megapg: process groups for Megatron-core by injection instead of module globals.

A *layout* says which ranks form which groups, a *session* makes those groups and owns them, and a
frozen *collection* carries them to whatever needs them. Importing megapg imports neither torch nor
Megatron-core: each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapg import errors as errors
    from megapg import megatron as megatron
    from megapg import testing as testing
    from megapg.collection import Lease, ProcessGroup, ProcessGroupCollection
    from megapg.comms.options import CommunicatorOptions
    from megapg.errors import MegapgError
    from megapg.layout import ParallelLayout
    from megapg.megatron import (
        from_megatron,
        from_parallel_state,
        published,
        resolve,
        to_megatron,
    )
    from megapg.sessions import LayoutSizes, Session, session

__version__ = "0.1.0"

_HOMES = {
    "CommunicatorOptions": "megapg.comms.options",
    "LayoutSizes": "megapg.sessions",
    "Lease": "megapg.collection",
    "MegapgError": "megapg.errors",
    "ParallelLayout": "megapg.layout",
    "ProcessGroup": "megapg.collection",
    "ProcessGroupCollection": "megapg.collection",
    "Session": "megapg.sessions",
    "from_megatron": "megapg.megatron",
    "from_parallel_state": "megapg.megatron",
    "published": "megapg.megatron",
    "resolve": "megapg.megatron",
    "session": "megapg.sessions",
    "to_megatron": "megapg.megatron",
}

# Parts that `import megapg` alone makes reachable, as in `megapg.testing.run_distributed`.
_SUBMODULES = ("errors", "megatron", "testing")

__all__ = [
    "CommunicatorOptions",
    "LayoutSizes",
    "Lease",
    "MegapgError",
    "ParallelLayout",
    "ProcessGroup",
    "ProcessGroupCollection",
    "Session",
    "from_megatron",
    "from_parallel_state",
    "published",
    "resolve",
    "session",
    "to_megatron",
]


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"megapg.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'megapg' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
