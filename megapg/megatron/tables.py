"""What differs between Megatron-core versions, and where its globals live, as data.

A name that a version does not have is simply not there; nothing else in megapg asks for a version.
"""

from __future__ import annotations

from collections.abc import Mapping

from megapg.migrate import mapping

OLDEST_CORE = (0, 16)

# The first version whose pipelined schedule (pipeline_parallel/schedules.py) takes instances of the
# core's own collection class only.
SCHEDULE_TESTS_CLASS = (0, 17)

# The first version that takes vp_stage instead of reading the virtual pipeline's rank from a
# global, and that ignores the virtual pipeline unless told otherwise.
TAKES_VP_STAGE = (0, 13)

# private global of parallel_state -> collection field. Where several globals hold one field, the
# first is the one it is read back from: the last three are 0.19's, where rematerialisation is off.
GROUP_GLOBALS: Mapping[str, str] = {
    **mapping.GROUP_GLOBALS,
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "intra_dp_cp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "intra_expt_dp",
}

# private global -> the group of ``pg.extras`` that it holds.
GLOO_GLOBALS: Mapping[str, str] = {
    "_DATA_PARALLEL_GROUP_GLOO": "gloo.dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "gloo.dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "gloo.intra_dp_cp",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "gloo.expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": "gloo.intra_expt_dp",
}

# What is neither a group nor a rank list but belongs to the published layout.
VIRTUAL_PIPELINE_SIZE = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
VIRTUAL_PIPELINE_RANK = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"
MEMORY_BUFFER = "_GLOBAL_MEMORY_BUFFER"
HYBRID_GROUPS = "_HYBRID_DP_CP_GROUPS"  # size -> group
GROUP_LIST = "_global_process_group_list"  # every group of this rank, None for WORLD

# What the names of the functions that make and end the groups begin with -> what to do instead,
# where the groups are a session's.
OWNERS_CALLS: Mapping[str, str] = {
    "initialize_": (
        "Leave the call out; for another layout open a second session "
        "(megapg.session(..., name=...)) and publish its groups."
    ),
    "create_": (
        "Make the group outside of the block, or with torch.distributed.new_group(), and pass it "
        "as an argument."
    ),
    "destroy_": (
        "Leave the call out: session.close() ends the groups, and leaving the block takes the rest "
        "down. What was initialised outside of the block is destroyed outside of it."
    ),
}

# Name of a communicator in Megatron's NCCL configuration file -> the fields that it configures:
# also those that are the same ranks while rematerialisation is off, so that they go on sharing it.
NCCL_NAMES: Mapping[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in ("tp", "pp", "mp", "cp", "tp_cp", "tp_dp", "tp_dp_cp", "embd", "pos_embd")
    },
    **{name: (name,) for name in ("dp", "hcp", "intra_dp_cp", "ep")},
    "dp_cp": ("dp_cp", "dp_cp_ag", "dp_cp_gtp_remat"),
    "ep_tp": ("expt_tp",),
    "tp_ep_mp": ("tp_ep",),
    "tp_ep_pp": ("tp_ep_pp", "tp_ep_pp_with_egtp_remat"),
    "ep_dp": ("expt_dp", "expt_dp_ag", "expt_dp_gtp_remat"),
    "intra_ep_dp": ("intra_expt_dp",),
    "inter_ep_dp": ("inter_dist_opt",),
    "intra_dist_opt_instance": ("intra_dist_opt",),
}

# With one optimizer instance Megatron makes no communicator for the first name: the group is the
# one of the second.
NCCL_NAMES_OF_ONE_INSTANCE: Mapping[str, str] = {"intra_dp_cp": "dp_cp", "intra_ep_dp": "ep_dp"}
