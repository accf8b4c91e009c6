"""The parameters of ``parallel_state``'s functions in each version of Megatron-core, 0.5 to 0.19.

:mod:`megapg.upstream.expressions` chooses by it what replaces a call, for the codemod and the
advice in traces. Versions are the minor numbers. A row maps the first version to the parameters
from then on; :data:`GONE` means that the function was removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

VERSIONS = range(5, 20)
GONE = "gone"

_CHECKED = "check_initialized=True"
_WITH_CP = "with_context_parallel=False"
_PARTIAL = "partial_data_parallel=False"
_REMAT = "with_gtp_remat=True"
_EXPERT_PARTIAL = "partial_expert_data_parallel=False"
_STAGE = {5: "ignore_virtual=False", 13: "ignore_virtual=True, vp_stage=None"}
_DATA_RANK = {5: _WITH_CP, 10: f"{_WITH_CP}, {_PARTIAL}", 19: f"{_WITH_CP}, {_REMAT}, {_PARTIAL}"}
_REMOVED_SPLIT = {5: "rank=None", 14: GONE}

# Functions without parameters in every version.
_NO_PARAMETERS: Mapping[int, str] = {
    5: "model_parallel_is_initialized get_tensor_model_parallel_world_size "
    "get_pipeline_model_parallel_world_size get_tensor_model_parallel_rank "
    "get_pipeline_model_parallel_rank is_rank_in_position_embedding_group "
    "get_virtual_pipeline_model_parallel_rank get_virtual_pipeline_model_parallel_world_size "
    "get_tensor_model_parallel_src_rank get_pipeline_model_parallel_first_rank "
    "get_pipeline_model_parallel_last_rank get_pipeline_model_parallel_next_rank "
    "get_pipeline_model_parallel_prev_rank get_context_parallel_world_size "
    "get_context_parallel_rank get_expert_model_parallel_world_size "
    "get_expert_model_parallel_rank get_global_memory_buffer destroy_global_memory_buffer "
    "destroy_model_parallel",
    6: "is_initialized",
    8: "get_tensor_and_context_parallel_world_size get_tensor_and_context_parallel_rank",
    9: "get_all_ranks",
    10: "get_model_parallel_src_rank get_expert_tensor_parallel_world_size "
    "get_expert_tensor_parallel_rank get_expert_tensor_and_model_parallel_world_size "
    "get_expert_tensor_and_model_parallel_rank",
    16: "get_expert_model_parallel_src_rank",
    19: "get_gtp_weight_remat_world_size get_gtp_weight_remat_rank "
    "get_expert_gtp_weight_remat_world_size get_expert_gtp_weight_remat_rank",
}

SIGNATURES: Mapping[str, Mapping[int, str]] = {
    **{name: {since: ""} for since, names in _NO_PARAMETERS.items() for name in names.split()},
    "is_unitialized": {5: "", 17: GONE},
    "get_model_parallel_group": {5: "", 8: "with_expert_parallel=False", 10: "", 13: _CHECKED},
    "get_tensor_model_parallel_group": {5: _CHECKED},
    "get_pipeline_model_parallel_group": {5: "", 13: _CHECKED},
    "get_data_parallel_group": {
        **_DATA_RANK,
        16: f"{_WITH_CP}, {_PARTIAL}, independent_all_gather=False",
        18: f"{_WITH_CP}, {_PARTIAL}",
    },
    "get_data_parallel_group_gloo": {5: _WITH_CP, 10: f"{_WITH_CP}, {_PARTIAL}"},
    "get_data_parallel_rank": _DATA_RANK,
    "get_data_parallel_world_size": _DATA_RANK,
    "get_data_parallel_src_rank": {5: _WITH_CP},
    "has_separate_all_gather_group": {16: "", 18: GONE},
    "get_inter_partial_data_parallel_group": {10: "", 13: GONE},
    "get_context_parallel_group": {5: _CHECKED},
    "get_context_parallel_global_ranks": {5: _CHECKED},
    "get_hierarchical_context_parallel_groups": {10: _CHECKED},
    "get_hybrid_data_context_parallel_groups": {16: f"{_CHECKED}, group_size=None"},
    "get_embedding_group": {5: "", 13: _CHECKED},
    "get_position_embedding_group": {5: "", 13: _CHECKED},
    "get_amax_reduction_group": {5: _WITH_CP, 9: f"{_WITH_CP}, tp_only_amax_red=False"},
    "get_tensor_and_data_parallel_group": {5: _WITH_CP, 15: f"{_CHECKED}, {_WITH_CP}"},
    "get_tensor_and_context_parallel_group": {8: "", 13: _CHECKED},
    "get_tensor_and_expert_parallel_group": {5: "", 10: GONE},
    "get_tensor_and_expert_parallel_world_size": {5: "", 10: GONE},
    "get_tensor_and_expert_parallel_rank": {7: "", 10: GONE},
    "get_data_modulo_expert_parallel_group": {
        5: "",
        8: _WITH_CP,
        10: "",
        13: _EXPERT_PARTIAL,
        17: GONE,
    },
    "get_data_modulo_expert_parallel_rank": {5: "", 8: _WITH_CP, 10: GONE},
    "get_data_modulo_expert_parallel_group_gloo": {6: "", 8: _WITH_CP, 10: GONE},
    "get_expert_model_parallel_group": {6: "", 10: _CHECKED},
    "get_expert_tensor_parallel_group": {10: _CHECKED},
    "get_expert_tensor_and_model_parallel_group": {10: _CHECKED},
    "get_expert_tensor_model_pipeline_parallel_group": {
        10: "",
        13: _CHECKED,
        19: f"{_CHECKED}, with_egtp_remat=False",
    },
    "get_expert_data_parallel_group": {
        10: "",
        13: f"{_CHECKED}, {_EXPERT_PARTIAL}",
        19: f"{_CHECKED}, {_REMAT}, {_EXPERT_PARTIAL}",
    },
    "get_expert_data_parallel_group_gloo": {10: "", 13: _EXPERT_PARTIAL},
    "get_expert_data_parallel_rank": {
        10: "",
        13: _EXPERT_PARTIAL,
        19: f"{_REMAT}, {_EXPERT_PARTIAL}",
    },
    "get_expert_data_parallel_world_size": {
        12: "",
        13: _EXPERT_PARTIAL,
        19: f"{_REMAT}, {_EXPERT_PARTIAL}",
    },
    "get_intra_distributed_optimizer_instance_group": {13: "", 15: _CHECKED},
    "get_inter_distributed_optimizer_instance_group": {13: "", 15: _CHECKED},
    "get_gtp_weight_remat_group": {19: _CHECKED},
    "get_gtp_weight_remat_global_ranks": {19: _CHECKED},
    "get_expert_gtp_weight_remat_group": {19: _CHECKED},
    "get_expert_gtp_weight_remat_global_ranks": {19: _CHECKED},
    "is_pipeline_first_stage": _STAGE,
    "is_pipeline_last_stage": _STAGE,
    "is_rank_in_embedding_group": _STAGE,
    # Functions that no field of a collection replaces; mapping.py has the reasons.
    "set_expert_model_parallel_world_size": {5: "world_size"},
    "set_tensor_model_parallel_world_size": {5: "world_size"},
    "set_pipeline_model_parallel_world_size": {5: "world_size"},
    "set_virtual_pipeline_model_parallel_world_size": {5: "world_size"},
    "set_expert_tensor_parallel_world_size": {10: "world_size"},
    "set_expert_model_parallel_rank": {5: "rank"},
    "set_tensor_model_parallel_rank": {5: "rank"},
    "set_pipeline_model_parallel_rank": {5: "rank"},
    "set_virtual_pipeline_model_parallel_rank": {5: "rank"},
    "set_expert_tensor_parallel_rank": {10: "rank"},
    "set_data_parallel_rank": {9: "rank"},
    "set_pipeline_model_parallel_split_rank": {5: "rank", 14: GONE},
    "get_pipeline_model_parallel_split_rank": {5: "", 14: GONE},
    "get_pipeline_model_parallel_decoder_start": {10: "", 14: GONE},
    "is_pipeline_stage_before_split": _REMOVED_SPLIT,
    "is_pipeline_stage_after_split": _REMOVED_SPLIT,
    "is_pipeline_stage_at_split": {5: "", 14: GONE},
    "is_inside_encoder": {9: "rank=None", 14: GONE},
    "is_inside_decoder": {9: "rank=None", 14: GONE},
    "get_nccl_options": {5: "pg_name, nccl_comm_cfgs"},
    "overwrite_nccl_comm_cfgs": {13: "nccl_comm_cfgs, pg_name, key_value_pair"},
    "update_pg_timeout": {15: "timeout, pg=None"},
    "generate_masked_orthogonal_rank_groups": {7: "world_size, parallel_size, mask"},
    "default_embedding_ranks": {9: "pp_ranks, split_rank=None", 14: "pp_ranks"},
    "default_position_embedding_ranks": {9: "pp_ranks, split_rank=None", 14: "pp_ranks"},
    "get_moe_layer_wise_logging_tracker": {8: "", 13: GONE},
    "get_global_symmetric_memory_buffer": {16: "", 17: GONE},
    "destroy_global_symmetric_memory_buffer": {16: "", 17: GONE},
    "create_hybrid_dp_cp_groups": {16: "rank, ranks, pg_options"},
    "create_all_gather_groups": {
        18: "for_expert_parallelism=False, timeout=None, nccl_comm_cfgs=None"
    },
    "create_hierarchical_parallel_groups": {
        10: "rank, ranks, group_size, hierarchical_group_sizes, pg_options",
        13: GONE,
    },
    "create_hierarchical_groups": {
        13: "rank, ranks, hierarchical_group_sizes, create_gloo_process_groups=False, "
        "pg_options=None, timeout=None, group_desc=None"
    },
    "create_group": {
        11: "ranks=None, timeout=None, backend=None, pg_options=None, "
        "use_local_synchronization=False, group_desc=None"
    },
    # A session replaces them. Their parameters differ in every version.
    "initialize_model_parallel": {5: "..."},
    "RankGenerator": {7: "..."},
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a getter; without a default where ``default`` is empty."""

    name: str
    default: str


def signature(name: str, version: int) -> tuple[Parameter, ...] | None:
    """The parameters of a function in a version; None where that does not have it."""
    written = _written(name, version)
    if written is None:
        return None
    pairs = (part.partition("=") for part in written.split(", ") if part)
    return tuple(Parameter(parameter, default) for parameter, _, default in pairs)


@cache
def _written(name: str, version: int) -> str | None:
    since = [row for row in SIGNATURES.get(name, ()) if row <= version]
    written = SIGNATURES[name][max(since)] if since else GONE
    return None if written == GONE else written


def functions(version: int) -> Iterator[str]:
    """The names of a version's functions."""
    return (name for name in SIGNATURES if _written(name, version) is not None)
