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
    from megapg import testing as testing
    from megapg.checkpoint.directory import latest, list_checkpoints
    from megapg.checkpoint.load import load_checkpoint
    from megapg.checkpoint.save import save_checkpoint
    from megapg.collection import ProcessGroupCollection
    from megapg.collection.mesh import from_mesh
    from megapg.communicators.communicator_options import CommunicatorOptions
    from megapg.errors import MegapgError
    from megapg.launch import Launch
    from megapg.layout import ParallelLayout
    from megapg.megatron import (
        allow_global_reads,
        from_megatron,
        from_parallel_state,
        groups_of,
        guard,
        open_sessions,
        published,
        resolve,
        session,
        to_megatron,
        was_passed,
    )
    from megapg.ownership.session import Session
    from megapg.ownership.suspend_several import resume, suspend
    from megapg.rendezvous.shared_store import SharedStore
    from megapg.rl.joint import JointGroup, joint_group
    from megapg.rl.refit.exchange import Refit
    from megapg.rl.refit.llama import llama_names
    from megapg.rl.refit.moves import Part
    from megapg.rl.refit.of_model import slices_of
    from megapg.rl.refit.slices import Slice, Slices
    from megapg.rl.turns import Turn, on_session
    from megapg.rng import capture_rng_state, fork_rng, restore_rng_state, seed_all

__version__ = "0.3.0"

_HOMES = {
    "CommunicatorOptions": "megapg.communicators.communicator_options",
    "Launch": "megapg.launch",
    "JointGroup": "megapg.rl.joint",
    "MegapgError": "megapg.errors",
    "ParallelLayout": "megapg.layout",
    "ProcessGroupCollection": "megapg.collection",
    "Part": "megapg.rl.refit.moves",
    "Refit": "megapg.rl.refit.exchange",
    "Session": "megapg.ownership.session",
    "SharedStore": "megapg.rendezvous.shared_store",
    "Slice": "megapg.rl.refit.slices",
    "Slices": "megapg.rl.refit.slices",
    "Turn": "megapg.rl.turns",
    "allow_global_reads": "megapg.megatron",
    "capture_rng_state": "megapg.rng",
    "fork_rng": "megapg.rng",
    "from_megatron": "megapg.megatron",
    "from_mesh": "megapg.collection.mesh",
    "from_parallel_state": "megapg.megatron",
    "groups_of": "megapg.megatron",
    "guard": "megapg.megatron",
    "joint_group": "megapg.rl.joint",
    "latest": "megapg.checkpoint.directory",
    "list_checkpoints": "megapg.checkpoint.directory",
    "llama_names": "megapg.rl.refit.llama",
    "load_checkpoint": "megapg.checkpoint.load",
    "on_session": "megapg.rl.turns",
    "open_sessions": "megapg.megatron",
    "published": "megapg.megatron",
    "resolve": "megapg.megatron",
    "resume": "megapg.ownership.suspend_several",
    "restore_rng_state": "megapg.rng",
    "save_checkpoint": "megapg.checkpoint.save",
    "seed_all": "megapg.rng",
    "session": "megapg.megatron",
    "slices_of": "megapg.rl.refit.of_model",
    "suspend": "megapg.ownership.suspend_several",
    "to_megatron": "megapg.megatron",
    "was_passed": "megapg.megatron",
}

# Parts that `import megapg` alone makes reachable, as in `megapg.testing.run_distributed`.
_SUBMODULES = ("errors", "launch", "megatron", "testing")

__all__ = [
    "CommunicatorOptions",
    "JointGroup",
    "Launch",
    "MegapgError",
    "ParallelLayout",
    "Part",
    "ProcessGroupCollection",
    "Refit",
    "Session",
    "SharedStore",
    "Slice",
    "Slices",
    "Turn",
    "allow_global_reads",
    "capture_rng_state",
    "fork_rng",
    "from_megatron",
    "from_mesh",
    "from_parallel_state",
    "groups_of",
    "guard",
    "joint_group",
    "latest",
    "list_checkpoints",
    "llama_names",
    "load_checkpoint",
    "on_session",
    "open_sessions",
    "published",
    "resolve",
    "restore_rng_state",
    "resume",
    "save_checkpoint",
    "seed_all",
    "session",
    "slices_of",
    "suspend",
    "to_megatron",
    "was_passed",
]


if not TYPE_CHECKING:  # or any name would be there for a type checker

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            return importlib.import_module(f"megapg.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'megapg' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBMODULES})
