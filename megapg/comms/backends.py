"""What differs between communication backends, as a table: one row each, no ``if`` chains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megapg.comms.options import CommunicatorOptions
from megapg.errors import UnsupportedOptionError

if TYPE_CHECKING:
    import torch.distributed as dist

# Fields whose collectives can be in flight at the same moment must not share an NCCL communicator,
# even where their ranks are equal: a communicator runs one collective after the other, and two
# orders on two ranks would deadlock. A field not named here is on the common lane.
_NCCL_LANES: Mapping[str, str] = {
    "pp": "pipeline",
    "embd": "embedding",
    "pos_embd": "embedding",
    "dp": "gradients",
    "dp_cp": "gradients",
    "dp_cp_gtp_remat": "gradients",
    "intra_dp_cp": "gradients",
    "expt_dp": "expert gradients",
    "expt_dp_gtp_remat": "expert gradients",
    "intra_expt_dp": "expert gradients",
    "inter_dist_opt": "optimizer instances",
    "ep": "experts",
    "expt_tp": "experts",
    "tp_ep": "experts",
    "dp_cp_ag": "all-gather",
    "expt_dp_ag": "expert all-gather",
    "hybrid": "hybrid context",
}


@dataclass(frozen=True)
class Backend:
    """One row of the table.

    Attributes:
        name: as torch.distributed spells it.
        lanes: field -> lane; fields on different lanes never share a communicator.
        options: turns megapg's options into torch's; raises where the backend has none.
        creation_environment: set, unless the user has set it, while communicators are made.
        alone: the backend has no peers to meet (torch's fake backend).
    """

    name: str
    options: Callable[[str, CommunicatorOptions], dist.ProcessGroupNCCL.Options | None]
    lanes: Mapping[str, str] = field(default_factory=dict)
    creation_environment: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False

    @property
    def connects_lazily(self) -> bool:
        """Whether making a communicator waits for nobody, and its members connect at first use."""
        switches = self.creation_environment.items()
        return bool(switches) and all(
            os.environ.get(key, value) == value for key, value in switches
        )


def _no_options(where: str, options: CommunicatorOptions) -> None:
    if given := options.given():
        names = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UnsupportedOptionError(
            f"{where}: {names} are NCCL settings, and this backend is not NCCL. Leave the options "
            "out here, or choose backend='nccl'."
        )


def _nccl_options(where: str, options: CommunicatorOptions) -> dist.ProcessGroupNCCL.Options | None:
    import torch.distributed as dist

    given = options.given()
    if not given:
        return None
    if not dist.is_nccl_available():
        raise UnsupportedOptionError(f"{where}: this torch was built without NCCL.")
    if options.net_name is not None and options.net_name.lower() not in ("ib", "socket"):
        raise UnsupportedOptionError(
            f"{where}: net_name={options.net_name!r}; NCCL has 'IB' and 'Socket'."
        )
    made = dist.ProcessGroupNCCL.Options(
        is_high_priority_stream=bool(given.pop("is_high_priority_stream", False))
    )
    for name, value in given.items():
        setattr(made.config, name, value)
    return made


BACKENDS: Mapping[str, Backend] = {
    row.name: row
    for row in (
        # Connecting every pair at once is most of what a gloo group costs; lazily, a pair connects
        # when it first talks.
        Backend("gloo", _no_options, creation_environment={"TORCH_GLOO_LAZY_INIT": "1"}),
        Backend("nccl", _nccl_options, lanes=_NCCL_LANES),
        Backend("fake", _no_options, alone=True),
    )
}


def backend_for(spelling: str) -> Backend:
    """The row for a torch backend string such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        UnsupportedOptionError: no row knows it.
    """
    named = [part.rpartition(":")[2] for part in spelling.lower().split(",")]
    for name in ("nccl", "gloo", "fake"):  # a mixed string behaves as its strictest part
        if name in named:
            return BACKENDS[name]
    raise UnsupportedOptionError(
        f"backend={spelling!r} is not one of {', '.join(BACKENDS)}, alone or as in "
        "'cpu:gloo,cuda:nccl'."
    )
