"""The one table of fields: what megapg and Megatron-core know of each field, one row a field.

Everything else that goes through the fields is derived from it: the ranks of groups
(:mod:`megapg.layout`), which fields may be None (:mod:`megapg.collection`), the NCCL communicators
(:mod:`megapg.communicators.lanes`), Megatron's getters and private globals
(:mod:`megapg.megatron.tables`), and their replacements in the codemod
(:mod:`megapg.upstream.mapping`). ARCHITECTURE.md has the steps that add a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megapg.layout.names import Field

DENSE, EXPERT = "dense", "expert"
_CP = "with_context_parallel"


@dataclass(frozen=True)
class Row:
    """What is known of one field.

    Attributes:
        grid: the grid of ranks in which its groups lie; empty if they follow from other groups.
        axes: the axes of that grid that a group spans. ``instance`` is the slow part of the expert
            grid's dp: the replica of the distributed optimizer. ``gtp`` is the axis of either grid
            over which Megatron-core 0.19 shards weights. Its ranks have different batches, as those
            of dp.
        getter: the middle of the name of Megatron's getters, such as ``get_{getter}_group``; empty
            if no core has one.
        flags: the arguments of the getters that must be true for this field.
        asks: what else Megatron has getters for: rank, size, ranks.
        held_in: the private global of ``parallel_state`` that holds the group.
        listed_in: the private global that lists its global ranks.
        may_be_none: None has a meaning in a collection, and Megatron's getter may return it.
        lane: fields of different lanes share no NCCL communicator; empty for the common lane.
        configured_as: the name of its communicator in Megatron's NCCL configuration file.
    """

    grid: str = ""
    axes: tuple[str, ...] = ()
    getter: str = ""
    flags: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    held_in: str = ""
    listed_in: str = ""
    may_be_none: bool = False
    lane: str = ""
    configured_as: str = ""


_COUNTED = ("rank", "size")

TABLE: Mapping[Field, Row] = {
    "tp": Row(
        DENSE,
        ("tp",),
        getter="tensor_model_parallel",
        asks=_COUNTED,
        held_in="_TENSOR_MODEL_PARALLEL_GROUP",
        listed_in="_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS",
        configured_as="tp",
    ),
    "pp": Row(
        DENSE,
        ("pp",),
        getter="pipeline_model_parallel",
        asks=_COUNTED,
        held_in="_PIPELINE_MODEL_PARALLEL_GROUP",
        listed_in="_PIPELINE_GLOBAL_RANKS",
        lane="pipeline",
        configured_as="pp",
    ),
    "mp": Row(
        DENSE,
        ("tp", "gtp", "pp"),
        getter="model_parallel",
        held_in="_MODEL_PARALLEL_GROUP",
        listed_in="_MODEL_PARALLEL_GLOBAL_RANKS",
        configured_as="mp",
    ),
    "cp": Row(
        DENSE,
        ("cp",),
        getter="context_parallel",
        asks=(*_COUNTED, "ranks"),
        held_in="_CONTEXT_PARALLEL_GROUP",
        listed_in="_CONTEXT_PARALLEL_GLOBAL_RANKS",
        configured_as="cp",
    ),
    "tp_cp": Row(
        DENSE,
        ("tp", "cp"),
        getter="tensor_and_context_parallel",
        asks=_COUNTED,
        held_in="_TENSOR_AND_CONTEXT_PARALLEL_GROUP",
        configured_as="tp_cp",
    ),
    "dp": Row(
        DENSE,
        ("dp",),
        getter="data_parallel",
        asks=_COUNTED,
        held_in="_DATA_PARALLEL_GROUP",
        listed_in="_DATA_PARALLEL_GLOBAL_RANKS",
        lane="gradients",
        configured_as="dp",
    ),
    "dp_cp": Row(
        DENSE,
        ("dp", "cp"),
        getter="data_parallel",
        flags=(_CP,),
        asks=_COUNTED,
        held_in="_DATA_PARALLEL_GROUP_WITH_CP",
        listed_in="_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP",
        lane="gradients",
        configured_as="dp_cp",
    ),
    "dp_cp_ag": Row(
        DENSE,
        ("dp", "cp"),
        getter="data_parallel",
        flags=(_CP, "independent_all_gather"),
        held_in="_DATA_PARALLEL_GROUP_WITH_CP_AG",
        may_be_none=True,
        lane="all-gather",
        configured_as="dp_cp",
    ),
    "dp_cp_gtp_remat": Row(
        DENSE,
        ("gtp", "dp", "cp"),
        getter="data_parallel",
        flags=(_CP, "with_gtp_remat"),
        asks=_COUNTED,
        held_in="_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
        lane="gradients",
        configured_as="dp_cp",
    ),
    "tp_dp": Row(
        DENSE,
        ("tp", "gtp", "dp"),
        getter="tensor_and_data_parallel",
        held_in="_TENSOR_AND_DATA_PARALLEL_GROUP",
        configured_as="tp_dp",
    ),
    "tp_dp_cp": Row(
        DENSE,
        ("tp", "gtp", "dp", "cp"),
        getter="tensor_and_data_parallel",
        flags=(_CP,),
        held_in="_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",
        configured_as="tp_dp_cp",
    ),
    "gtp_remat": Row(
        DENSE,
        ("gtp",),
        getter="gtp_weight_remat",
        asks=(*_COUNTED, "ranks"),
        held_in="_GTP_WEIGHT_REMAT_GROUP",
        listed_in="_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
        may_be_none=True,
    ),
    "ep": Row(
        EXPERT,
        ("ep",),
        getter="expert_model_parallel",
        asks=_COUNTED,
        held_in="_EXPERT_MODEL_PARALLEL_GROUP",
        listed_in="_EXPERT_MODEL_PARALLEL_RANKS",
        lane="experts",
        configured_as="ep",
    ),
    "expt_tp": Row(
        EXPERT,
        ("tp",),
        getter="expert_tensor_parallel",
        asks=_COUNTED,
        held_in="_EXPERT_TENSOR_PARALLEL_GROUP",
        lane="experts",
        configured_as="ep_tp",
    ),
    "tp_ep": Row(
        EXPERT,
        ("tp", "ep"),
        getter="expert_tensor_and_model_parallel",
        asks=_COUNTED,
        held_in="_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
        lane="experts",
        configured_as="tp_ep_mp",
    ),
    "tp_ep_pp": Row(
        EXPERT,
        ("tp", "ep", "pp"),
        getter="expert_tensor_model_pipeline_parallel",
        held_in="_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        configured_as="tp_ep_pp",
    ),
    "tp_ep_pp_with_egtp_remat": Row(
        EXPERT,
        ("tp", "ep", "gtp", "pp"),
        getter="expert_tensor_model_pipeline_parallel",
        flags=("with_egtp_remat",),
        held_in="_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP",
        configured_as="tp_ep_pp",
    ),
    "expt_dp": Row(
        EXPERT,
        ("dp", "instance"),
        getter="expert_data_parallel",
        asks=_COUNTED,
        held_in="_EXPERT_DATA_PARALLEL_GROUP",
        lane="expert gradients",
        configured_as="ep_dp",
    ),
    "expt_dp_ag": Row(
        EXPERT,
        ("dp", "instance"),
        may_be_none=True,
        lane="expert all-gather",
        configured_as="ep_dp",
    ),
    "expt_dp_gtp_remat": Row(
        EXPERT,
        ("gtp", "dp", "instance"),
        getter="expert_data_parallel",
        flags=("with_gtp_remat",),
        asks=_COUNTED,
        held_in="_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
        lane="expert gradients",
        configured_as="ep_dp",
    ),
    "expt_gtp_remat": Row(
        EXPERT,
        ("gtp",),
        getter="expert_gtp_weight_remat",
        asks=(*_COUNTED, "ranks"),
        held_in="_EXPERT_GTP_WEIGHT_REMAT_GROUP",
        listed_in="_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS",
        may_be_none=True,
    ),
    "intra_expt_dp": Row(
        EXPERT,
        ("dp",),
        getter="expert_data_parallel",
        flags=("partial_expert_data_parallel",),
        asks=_COUNTED,
        held_in="_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        lane="expert gradients",
        configured_as="intra_ep_dp",
    ),
    "inter_dist_opt": Row(
        EXPERT,
        ("instance",),
        getter="inter_distributed_optimizer_instance",
        held_in="_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        may_be_none=True,
        lane="optimizer instances",
        configured_as="inter_ep_dp",
    ),
    "intra_dist_opt": Row(
        EXPERT,
        ("tp", "ep", "gtp", "dp", "pp"),
        getter="intra_distributed_optimizer_instance",
        held_in="_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        configured_as="intra_dist_opt_instance",
    ),
    "embd": Row(
        getter="embedding",
        held_in="_EMBEDDING_GROUP",
        listed_in="_EMBEDDING_GLOBAL_RANKS",
        may_be_none=True,
        lane="embedding",
        configured_as="embd",
    ),
    "pos_embd": Row(
        getter="position_embedding",
        held_in="_POSITION_EMBEDDING_GROUP",
        listed_in="_POSITION_EMBEDDING_GLOBAL_RANKS",
        may_be_none=True,
        lane="embedding",
        configured_as="pos_embd",
    ),
    "intra_dp_cp": Row(
        getter="data_parallel",
        flags=(_CP, "partial_data_parallel"),
        asks=_COUNTED,
        held_in="_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        lane="gradients",
        configured_as="intra_dp_cp",
    ),
    "hcp": Row(
        getter="hierarchical_context_parallel",
        held_in="_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
        may_be_none=True,
        configured_as="hcp",
    ),
}
"""Every field of a collection."""

GROUP_GLOBALS: Mapping[str, Field] = {r.held_in: field for field, r in TABLE.items() if r.held_in}
"""Private global of ``parallel_state`` -> the field whose group it holds."""
