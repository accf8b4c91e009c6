"""Tables of the differences between Megatron-core versions, and of the names of its globals.

A name that a version does not have is simply missing there. No other module tests the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megapg.layout import ParallelLayout, fields
from megapg.layout.fields import TABLE, Row

OLDEST_CORE = (0, 16)

# The first version whose globals can be read: by resolve(), the getters, and the watchers.
OLDEST_READ = (0, 12)

# The first version whose pipelined schedule (pipeline_parallel/schedules.py) accepts only instances
# of the core's own collection class.
SCHEDULE_TESTS_CLASS = (0, 17)

# The first version that takes vp_stage, instead of reading the virtual pipeline's rank from a
# global, and that ignores the virtual pipeline by default.
TAKES_VP_STAGE = (0, 13)

# private global of parallel_state -> collection field. If several globals hold one field, it is
# read from the first. The last three are 0.19's, without rematerialisation.
GROUP_GLOBALS: Mapping[str, str] = {
    **fields.GROUP_GLOBALS,
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "intra_dp_cp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "intra_expt_dp",
}

HOLDS: Mapping[str, str] = {field: name for name, field in reversed([*GROUP_GLOBALS.items()])}
"""Field -> the global that holds its group: the first of several."""

# The fields of the last three if 0.19 shards weights over more than one rank of the grid. With
# context parallelism as well, no field has the ranks of the first one.
_WITH_REMAT: Mapping[str, tuple[str, str]] = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": ("gtp_remat", "dp_cp_gtp_remat"),
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": ("gtp_remat", "dp_cp_gtp_remat"),
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": (
        "expt_gtp_remat",
        "expt_dp_gtp_remat",
    ),
}


def group_globals(layout: ParallelLayout | None) -> Mapping[str, str]:
    """Return :data:`GROUP_GLOBALS` for a layout; ``""`` for a global that fits no field."""
    found = dict(GROUP_GLOBALS)
    for name, (size, wider) in _WITH_REMAT.items():
        if layout is not None and getattr(layout, size) > 1:
            found[name] = wider
    if layout is not None and layout.gtp_remat > 1 and layout.cp > 1:
        found["_DATA_PARALLEL_GROUP_WITH_GTP_REMAT"] = ""
    return found


# Globals that every initialisation sets, and that destroy_model_parallel() always resets.
ALWAYS_SET: Mapping[str, str] = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_DATA_PARALLEL_GROUP": "dp",
}

# private global -> the group of ``pg.extras`` that it holds
GLOO_GLOBALS: Mapping[str, str] = {
    "_DATA_PARALLEL_GROUP_GLOO": "gloo.dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "gloo.dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "gloo.intra_dp_cp",
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": "gloo.expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": "gloo.intra_expt_dp",
}


@dataclass(frozen=True)
class Getters:
    """The functions of ``parallel_state`` that return a field or an extra."""

    group: str  # returns the group; for ``hcp`` the list of its levels
    rank: str = ""  # returns this rank's index; empty: ask the group
    size: str = ""  # likewise, the number of ranks
    ranks: str = ""  # likewise, the global ranks
    # The arguments that choose the group. A True one is required: a core whose getter does not take
    # it has no such group. A False one is left out if the getter does not take it.
    flags: Mapping[str, bool] = field(default_factory=dict)


def _getters(field: str, row: Row) -> Getters:
    ending = "groups" if field == "hcp" else "group"
    more = {ask: f"get_{row.getter}_{_ENDINGS[ask]}" for ask in row.asks}
    flags = dict.fromkeys(row.flags, True)
    if row.getter in _WIDER and flags.keys().isdisjoint(_CHOOSE_THE_WIDER):
        flags["with_gtp_remat"] = False
    return Getters(f"get_{row.getter}_{ending}", **more, flags=flags)


_ENDINGS = {"rank": "rank", "size": "world_size", "ranks": "global_ranks"}

# With rematerialisation there are two groups of data parallel ranks, and 0.19 returns the wider one
# by default.
_WIDER = ("data_parallel", "expert_data_parallel")
_CHOOSE_THE_WIDER = ("with_gtp_remat", "independent_all_gather")
_WITH_CP = {"with_context_parallel": True}
_PARTIAL = {"with_context_parallel": True, "partial_data_parallel": True}
_EXPERT_PARTIAL = {"partial_expert_data_parallel": True}

GETTERS: Mapping[str, Getters] = {
    **{name: _getters(name, row) for name, row in TABLE.items() if row.getter},
    "gloo.dp": Getters("get_data_parallel_group_gloo"),
    "gloo.dp_cp": Getters("get_data_parallel_group_gloo", flags=_WITH_CP),
    "gloo.intra_dp_cp": Getters("get_data_parallel_group_gloo", flags=_PARTIAL),
    "gloo.expt_dp": Getters("get_expert_data_parallel_group_gloo"),
    "gloo.intra_expt_dp": Getters("get_expert_data_parallel_group_gloo", flags=_EXPERT_PARTIAL),
}
"""Field or extra -> its getters, for every core that has them. No core has a getter for
``expt_dp_ag``, or one that names all hybrid groups.
"""

# Variables of a layout that are neither groups nor lists of ranks.
VIRTUAL_PIPELINE_SIZE = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
VIRTUAL_PIPELINE_RANK = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"
MEMORY_BUFFER = "_GLOBAL_MEMORY_BUFFER"
HYBRID_GROUPS = "_HYBRID_DP_CP_GROUPS"  # size -> group
GROUP_LIST = "_global_process_group_list"  # every group of this rank, None for WORLD

# Prefix of functions that make and end the groups -> advice for groups of a session.
OWNERS_CALLS: Mapping[str, str] = {
    "initialize_": (
        "Leave the call out; for another layout open a second session "
        "(megapg.session(..., name=...)) and publish its groups."
    ),
    "destroy_": (
        "Leave the call out: session.close() ends the groups, and leaving the block takes the rest "
        "down. What was initialised outside of the block is destroyed outside of it. Of groups of "
        "megapg.megatron.initialize_model_parallel() call megapg.megatron.destroy_model_parallel()."
    ),
}

# Megatron-core's helper that reads a group from the globals if a function was passed none.
GROUP_IF_NONE = "get_tensor_model_parallel_group_if_none"

_LAYERS = "megatron.core.tensor_parallel.layers"
USED_IF: Mapping[tuple[str, str], tuple[str, ...]] = {
    (_LAYERS, "linear_with_grad_accumulation_and_async_allreduce"): (
        "allreduce_dgrad",
        "sequence_parallel",
    ),
    (_LAYERS, "linear_with_frozen_weight"): ("allreduce_dgrad", "sequence_parallel"),
}
"""Module and function of the core -> parameters, one of which must be true for it to use the group
that it reads. Every ``RowParallelLinear`` reads it, in 0.16 to 0.19.
"""

# Name of a communicator in Megatron's NCCL configuration file -> the fields that it configures.
# They include fields with the same ranks without rematerialisation, which share it.
NCCL_NAMES: Mapping[str, tuple[str, ...]] = {
    name: tuple(field for field, row in TABLE.items() if row.configured_as == name)
    for name in dict.fromkeys(row.configured_as for row in TABLE.values())
    if name
}

# With one optimizer instance, Megatron makes no communicator for the first name: the group is that
# of the second name.
NCCL_NAMES_OF_ONE_INSTANCE: Mapping[str, str] = {"intra_dp_cp": "dp_cp", "intra_ep_dp": "ep_dp"}
