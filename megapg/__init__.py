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
    from megapg import launch as launch
    from megapg import megatron as megatron
    from megapg import signals as signals
    from megapg import testing as testing
    from megapg.checkpoint.load import LoadedCheckpoint, load_checkpoint
    from megapg.checkpoint.names import CheckpointInfo, latest, list_checkpoints
    from megapg.checkpoint.save import save_checkpoint
    from megapg.checkpoint.saves import CheckpointSave
    from megapg.collection import Lease, LeaseState, ProcessGroup, ProcessGroupCollection
    from megapg.comms.offload import OffloadReport
    from megapg.comms.options import CommunicatorOptions
    from megapg.errors import MegapgError
    from megapg.launch import Launch
    from megapg.layout import ParallelLayout
    from megapg.megatron import (
        from_megatron,
        from_parallel_state,
        groups_of,
        published,
        resolve,
        to_megatron,
    )
    from megapg.rebind import Rebound
    from megapg.rng import RngState, capture_rng_state, fork_rng, restore_rng_state, seed_all
    from megapg.sessions import LayoutSizes, Session, session

__version__ = "0.1.0"

_HOMES = {
    "CheckpointInfo": "megapg.checkpoint.names",
    "CheckpointSave": "megapg.checkpoint.saves",
    "CommunicatorOptions": "megapg.comms.options",
    "Launch": "megapg.launch",
    "LayoutSizes": "megapg.sessions",
    "Lease": "megapg.collection",
    "LeaseState": "megapg.collection",
    "LoadedCheckpoint": "megapg.checkpoint.load",
    "MegapgError": "megapg.errors",
    "OffloadReport": "megapg.comms.offload",
    "ParallelLayout": "megapg.layout",
    "ProcessGroup": "megapg.collection",
    "ProcessGroupCollection": "megapg.collection",
    "Rebound": "megapg.rebind",
    "RngState": "megapg.rng",
    "Session": "megapg.sessions",
    "capture_rng_state": "megapg.rng",
    "fork_rng": "megapg.rng",
    "from_megatron": "megapg.megatron",
    "from_parallel_state": "megapg.megatron",
    "groups_of": "megapg.megatron",
    "latest": "megapg.checkpoint.names",
    "list_checkpoints": "megapg.checkpoint.names",
    "load_checkpoint": "megapg.checkpoint.load",
    "published": "megapg.megatron",
    "resolve": "megapg.megatron",
    "restore_rng_state": "megapg.rng",
    "save_checkpoint": "megapg.checkpoint.save",
    "seed_all": "megapg.rng",
    "session": "megapg.sessions",
    "to_megatron": "megapg.megatron",
}

# Parts that `import megapg` alone makes reachable, as in `megapg.testing.run_distributed`.
_SUBMODULES = ("errors", "launch", "megatron", "signals", "testing")

__all__ = [
    "CheckpointInfo",
    "CheckpointSave",
    "CommunicatorOptions",
    "Launch",
    "LayoutSizes",
    "Lease",
    "LeaseState",
    "LoadedCheckpoint",
    "MegapgError",
    "OffloadReport",
    "ParallelLayout",
    "ProcessGroup",
    "ProcessGroupCollection",
    "Rebound",
    "RngState",
    "Session",
    "capture_rng_state",
    "fork_rng",
    "from_megatron",
    "from_parallel_state",
    "groups_of",
    "latest",
    "list_checkpoints",
    "load_checkpoint",
    "published",
    "resolve",
    "restore_rng_state",
    "save_checkpoint",
    "seed_all",
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
