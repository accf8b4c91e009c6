"""The differences between communication backends, as a table with one row each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist

from megapg import torch_private
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.lanes import NCCL_LANES
from megapg.communicators.nccl_options import nccl_options, torchcomms_hints
from megapg.errors import UnsupportedOptionError
from megapg.torch_private import Options


@dataclass(frozen=True)
class Backend:
    """One row of the table.

    Attributes:
        name: as torch.distributed spells it.
        lanes: field -> lane. Fields on different lanes never share a communicator.
        options: converts megapg's options to torch's, or to torchcomms' hints. Returns None for no
            options, and raises if the backend takes none.
        split: when groups are split from WORLD's communicator: never, if WORLD is bound to a
            device, or always. All ranks of WORLD then create a family of groups in one call.
            Otherwise only the members of a group create it.
        creation_environment: variables to set while communicators are created, unless the user has
            set them.
        can_be_lazy: returns True if this torch supports connecting at first use.
        alone: True if the backend has no peers (torch's fake backend).
        holds_memory: True if its communicators hold device memory worth releasing.
        cannot_suspend: returns why its communicators can't be suspended here; empty if they can.
        unused: returns True if a communicator has never connected and so holds no memory.
    """

    name: str
    options: Callable[[str, CommunicatorOptions], Options | None]
    lanes: Mapping[str, str] = field(default_factory=dict)
    split: Literal["never", "on a bound WORLD", "always"] = "never"
    creation_environment: Mapping[str, str] = field(default_factory=dict)
    can_be_lazy: Callable[[], bool] = lambda: False
    alone: bool = False
    holds_memory: bool = False
    cannot_suspend: Callable[[], str] = lambda: "it keeps no memory of a device"
    unused: Callable[[object], bool] = lambda communicator: False

    @property
    def connects_lazily(self) -> bool:
        """True if creation does not block and members connect on first use."""
        switches = self.creation_environment.items()
        asked = all(os.environ.get(key, value) == value for key, value in switches)
        return asked and self.can_be_lazy()


def _no_options(where: str, options: CommunicatorOptions) -> None:
    if given := options.given():
        names = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UnsupportedOptionError(
            f"{where}: {names} are NCCL settings, and this backend is not NCCL. Leave the options "
            "out here, or choose backend='nccl'."
        )


# The first NCCL that can suspend a communicator. torch must also have been built with it.
_NCCL_SUSPENDS = (2, 29, 7)


def _nccl_cannot_suspend() -> str:
    if not torch_private.can_suspend():
        return f"torch {torch.__version__} can't suspend a communicator; 2.13 can"
    if not dist.is_nccl_available():
        return "this torch was built without NCCL"
    found = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    if found < _NCCL_SUSPENDS:
        version, needed = (".".join(map(str, each)) for each in (found, _NCCL_SUSPENDS))
        return f"NCCL {version} can't suspend a communicator; {needed} can"
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return "NCCL_CUMEM_ENABLE=0 takes the memory management away that suspending is built on"
    return ""


_NCCL = Backend(
    "nccl",
    nccl_options,
    lanes=NCCL_LANES,
    split="on a bound WORLD",
    holds_memory=True,
    cannot_suspend=_nccl_cannot_suspend,
    unused=torch_private.never_connected,
)
# Used for any of torch's backends while TORCH_DISTRIBUTED_USE_TORCHCOMMS is set.
_TORCHCOMMS = Backend(
    "torchcomms",
    torchcomms_hints,
    lanes=NCCL_LANES,
    split="always",
    cannot_suspend=lambda: "torchcomms has no call that suspends a communicator",
)
_FAKE = Backend("fake", _no_options, alone=True)

# A mixed device map behaves as the first of these rows that it contains.
BACKENDS: Mapping[str, Backend] = {
    row.name: row
    for row in (
        _NCCL,
        replace(_NCCL, name="nccl2"),  # torch's newer NCCL backend, in releases that have both
        # Connecting every pair is most of the cost of creating a gloo group. Lazily, a pair
        # connects when it first communicates.
        Backend(
            "gloo",
            _no_options,
            creation_environment={"TORCH_GLOO_LAZY_INIT": "1"},
            can_be_lazy=torch_private.gloo_can_be_lazy,
        ),
        _TORCHCOMMS,
        _FAKE,
    )
}


def rows_of(spelling: str) -> list[Backend]:
    """Return the rows for a torch backend string such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

    Each row once, in the table's order. Unknown backends have no row.
    """
    named = {part.rpartition(":")[2] for part in spelling.lower().split(",")}
    rows = [row for row in BACKENDS.values() if row.name in named - {_TORCHCOMMS.name}]
    if rows in ([], [_FAKE]) or not torch_private.on_torchcomms():
        return rows
    takes_hints = any(row.options is nccl_options for row in rows)
    return [_TORCHCOMMS if takes_hints else replace(_TORCHCOMMS, options=_no_options)]


def backend_for(spelling: str) -> Backend:
    """Return the row that decides how groups of a torch backend string are created: the first.

    Raises:
        UnsupportedOptionError: no row matches.
    """
    rows = rows_of(spelling)
    if not rows:
        known = [name for name in BACKENDS if name != _TORCHCOMMS.name]
        raise UnsupportedOptionError(
            f"backend={spelling!r} is not one of {', '.join(known)}, alone or as in "
            "'cpu:gloo,cuda:nccl'."
        )
    return rows[0]
