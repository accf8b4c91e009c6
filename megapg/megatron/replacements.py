"""What to write instead of a read of Megatron's globals.

Names and arguments in, the collection's field and an expression out, for every getter and every
private global of the supported cores. In it ``pg`` is the collection, ``getters`` is
:mod:`megapg.megatron.getters`, and ``vp_stage`` the model chunk that the caller works on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megapg.megatron.tables import GLOO_GLOBALS, GROUP_GLOBALS, HYBRID_GROUPS
from megapg.migrate.mapping import OPTIONAL_FIELDS, RANK_GLOBALS


@dataclass(frozen=True)
class Replacement:
    """What serves in place of one read.

    Attributes:
        field: the collection's field; empty where it is no group's business.
        write: the expression to write; empty for a name that no supported core has.
    """

    field: str
    write: str


NOTHING_KNOWN = Replacement("", "")

# Named like a getter, but it reads no global.
NOT_READS = frozenset({"get_nccl_options"})

# The middle of a getter's name -> rows of (the arguments that are true, the field): the first row
# whose arguments all are. What an argument defaults to is the installed core's business: 0.19
# counts rematerialisation in unless told otherwise.
_Rows = tuple[tuple[tuple[str, ...], str], ...]
_FIELDS: Mapping[str, _Rows] = {
    "tensor_model_parallel": (((), "tp"),),
    "pipeline_model_parallel": (((), "pp"),),
    "model_parallel": (((), "mp"),),
    "context_parallel": (((), "cp"),),
    "tensor_and_context_parallel": (((), "tp_cp"),),
    "embedding": (((), "embd"),),
    "position_embedding": (((), "pos_embd"),),
    "data_parallel": (
        (("partial_data_parallel",), "intra_dp_cp"),
        (("with_context_parallel", "independent_all_gather"), "dp_cp_ag"),
        (("with_context_parallel", "with_gtp_remat"), "dp_cp_gtp_remat"),
        (("with_context_parallel",), "dp_cp"),
        ((), "dp"),
    ),
    "tensor_and_data_parallel": ((("with_context_parallel",), "tp_dp_cp"), ((), "tp_dp")),
    "amax_reduction": (
        (("with_context_parallel", "tp_only_amax_red"), "tp_cp"),
        (("with_context_parallel",), "tp_dp_cp"),
        (("tp_only_amax_red",), "tp"),
        ((), "tp_dp"),
    ),
    "expert_model_parallel": (((), "ep"),),
    "expert_tensor_parallel": (((), "expt_tp"),),
    "expert_tensor_and_model_parallel": (((), "tp_ep"),),
    "expert_tensor_model_pipeline_parallel": (
        (("with_egtp_remat",), "tp_ep_pp_with_egtp_remat"),
        ((), "tp_ep_pp"),
    ),
    "expert_data_parallel": (
        (("partial_expert_data_parallel",), "intra_expt_dp"),
        (("with_gtp_remat",), "expt_dp_gtp_remat"),
        ((), "expt_dp"),
    ),
    "data_modulo_expert_parallel": (
        (("partial_expert_data_parallel",), "intra_expt_dp"),
        ((), "expt_dp"),
    ),
    "intra_distributed_optimizer_instance": (((), "intra_dist_opt"),),
    "inter_distributed_optimizer_instance": (((), "inter_dist_opt"),),
    "gtp_weight_remat": (((), "gtp_remat"),),
    "expert_gtp_weight_remat": (((), "expt_gtp_remat"),),
}

# The end of a getter's name -> what it asks of the field.
_FORMS: Mapping[str, str] = {
    "group": "pg.{field}",
    "rank": 'pg.rank("{field}")',
    "world_size": 'pg.size("{field}")',
    "src_rank": 'pg.ranks("{field}")[0]',
    "global_ranks": 'list(pg.ranks("{field}"))',
    "group_gloo": 'getters.gloo_group(pg, "{field}")',
}

# Of a group that may be None, since the getter fails there.
_FORM_OF_OPTIONAL = 'getters.present_group(pg, "{field}")'

# Whole names that do not follow the pattern. Braces take the call's arguments.
_BY_NAME: Mapping[str, Replacement] = {
    "is_initialized": Replacement("dp", "getters.is_initialized(pg)"),
    "is_unitialized": Replacement("dp", "not getters.is_initialized(pg)"),
    "model_parallel_is_initialized": Replacement(
        "tp, pp, dp", "getters.model_parallel_is_initialized(pg)"
    ),
    "get_hierarchical_context_parallel_groups": Replacement(
        "hcp", "getters.hierarchical_groups(pg)"
    ),
    "get_pipeline_model_parallel_split_rank": Replacement("", "getters.pipeline_split_rank(pg)"),
    "get_pipeline_model_parallel_decoder_start": Replacement(
        "", "getters.pipeline_decoder_start(pg)"
    ),
    "is_pipeline_stage_at_split": Replacement("pp", "getters.is_pipeline_stage_at_split(pg)"),
    **{
        name: Replacement("pp", f"getters.{name}(pg, rank={{rank}})")
        for name in (
            *("is_pipeline_stage_before_split", "is_pipeline_stage_after_split"),
            *("is_inside_encoder", "is_inside_decoder"),
        )
    },
    "get_all_ranks": Replacement("tp, dp, cp, pp, ep", "getters.all_ranks(pg)"),
    "has_separate_all_gather_group": Replacement(
        "dp_cp_ag", "getters.has_separate_all_gather_group(pg)"
    ),
    "get_hybrid_data_context_parallel_groups": Replacement(
        "hybrid.{group_size}", "getters.hybrid_group(pg, {group_size})"
    ),
    "get_pipeline_model_parallel_first_rank": Replacement("pp", "getters.pipeline_first_rank(pg)"),
    "get_pipeline_model_parallel_last_rank": Replacement("pp", "getters.pipeline_last_rank(pg)"),
    "get_pipeline_model_parallel_next_rank": Replacement("pp", "getters.pipeline_next_rank(pg)"),
    "get_pipeline_model_parallel_prev_rank": Replacement("pp", "getters.pipeline_prev_rank(pg)"),
    "is_rank_in_position_embedding_group": Replacement(
        "pos_embd", "getters.is_rank_in_position_embedding_group(pg)"
    ),
    "get_virtual_pipeline_model_parallel_world_size": Replacement(
        "", "getters.virtual_pipeline_size(pg)"
    ),
    "get_virtual_pipeline_model_parallel_rank": Replacement("", "vp_stage"),
    # Where weights are not rematerialised there is no group, and the answer is 0.
    **{
        f"get_{middle}_{ending}": Replacement(
            field, f'0 if pg.{field} is None else pg.{ask}("{field}")'
        )
        for middle, field in (
            ("gtp_weight_remat", "gtp_remat"),
            ("expert_gtp_weight_remat", "expt_gtp_remat"),
        )
        for ending, ask in (("rank", "rank"), ("world_size", "size"))
    },
    "get_global_memory_buffer": Replacement("", "getters.memory_buffer(pg)"),
    "get_global_symmetric_memory_buffer": Replacement("", "a symmetric buffer of your own"),
}

# Asked of the rank, or with ignore_virtual=False of one of its model chunks.
_OF_A_STAGE: Mapping[str, str] = {
    "is_pipeline_first_stage": "pp",
    "is_pipeline_last_stage": "pp",
    "is_rank_in_embedding_group": "embd",
}

COLLECTION_PARAMETER = "pg_collection"

# Where a function is told that it works for experts, its tp_group is theirs. Not being told so says
# nothing: the cores hand the experts' group on to functions with that flag at its default.
EXPERT_FLAG = "is_expert"
TP_GROUP_OF_EXPERTS = ("expt_tp",)


def replacement(name: str, arguments: Mapping[str, object]) -> Replacement:
    """What serves in place of reading ``name``, a getter or a private global.

    Args:
        name: as ``parallel_state`` has it.
        arguments: of the call, those left to their defaults included; none for a private global.
    """
    if name in GROUP_GLOBALS:
        return Replacement(GROUP_GLOBALS[name], f"pg.{GROUP_GLOBALS[name]}")
    if name in RANK_GLOBALS:
        return Replacement(RANK_GLOBALS[name], f'pg.ranks("{RANK_GLOBALS[name]}")')
    if name in GLOO_GLOBALS:
        return Replacement(GLOO_GLOBALS[name], f'pg.extras["{GLOO_GLOBALS[name]}"]')
    if name == HYBRID_GROUPS:
        return Replacement("", "getters.hybrid_group(pg, size)")
    # _MPU_TENSOR_MODEL_PARALLEL_RANK and the like are what the getter of that name answers.
    getter = name if name[0] != "_" else "get" + name.removeprefix("_MPU").lower()
    if getter in _BY_NAME:
        found = _BY_NAME[getter]
        return Replacement(found.field.format(**arguments), found.write.format(**arguments))
    if getter in _OF_A_STAGE:
        of_chunk = not arguments.get("ignore_virtual", True)
        chunk = ", ignore_virtual=False, vp_stage=vp_stage" if of_chunk else ""
        return Replacement(_OF_A_STAGE[getter], f"getters.{getter}(pg{chunk})")
    for ending, form in _FORMS.items():
        rows = _FIELDS.get(getter.removeprefix("get_").removesuffix(f"_{ending}"), ())
        for true, field in rows:
            if all(arguments.get(argument) for argument in true):
                if ending == "group" and field in OPTIONAL_FIELDS:
                    form = _FORM_OF_OPTIONAL
                return Replacement(
                    f"gloo.{field}" if ending == "group_gloo" else field, form.format(field=field)
                )
    return NOTHING_KNOWN
