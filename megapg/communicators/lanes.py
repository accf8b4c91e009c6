"""The fields that must not share an NCCL communicator. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

# Fields whose collectives can run at the same time must not share an NCCL communicator, even if
# their ranks are equal. A communicator runs its collectives in sequence, and a different order on
# two ranks would deadlock. Fields not listed here are on the common lane.
NCCL_LANES: Mapping[str, str] = {
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
