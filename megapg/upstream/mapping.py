"""The table from each read of Megatron's globals to its replacement, for every version.

In the replacements, ``pg`` is the collection and ``getters`` is ``megapg.megatron.getters``, which
has a function for every answer that no field holds. A trace of a running job shows the same
expressions, and its own for private globals. If no expression is certain to mean the same, the
answer is a reason (:mod:`megapg.migrate.reasons`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megapg.layout import FIELDS
from megapg.layout.fields import GROUP_GLOBALS, TABLE


@dataclass(frozen=True)
class Argument:
    """One argument of a call, as written.

    Attributes:
        text: its source; for ``*args`` and ``**kwargs`` with the stars.
        keyword: its name; empty for a positional one.
    """

    text: str
    keyword: str = ""

    @property
    def starred(self) -> bool:
        """True if it stands for arguments that can't be seen."""
        return self.text.startswith("*")


class Takes(StrEnum):
    """The sources from which the collection of an expression may come."""

    COLLECTION = "collection"  # any that has the fields
    JOB = "job"  # a session's, or the globals' own groups: others do not know the job
    OPTIONAL = "optional"  # the argument itself, None included: the read asks if it exists
    LAZY = "lazy"  # any; must not raise if neither it nor the globals have the group
    GLOBALS = "globals"  # megapg.resolve(None): state of the job that no group has


@dataclass(frozen=True)
class Replacement:
    """The replacement of a read.

    Attributes:
        expression: the text to write, with ``pg`` and ``getters`` as names.
        template: the same with ``$pg`` and ``$getters`` instead of the names, for :meth:`write`.
        field: the field that is used; empty if there are several, or a run-time flag chooses.
        asks: the property that is read: group, rank, size, ranks, first; empty for any other.
        caution: code of a caution; empty if there is none.
        needs: every field that the expression reads; empty if it reads none, or if they are known
            only at run time.
        takes: the source of the collection.
    """

    template: str
    field: str = ""
    asks: str = ""
    caution: str = ""
    needs: tuple[str, ...] = ()
    takes: Takes = Takes.COLLECTION

    @property
    def expression(self) -> str:
        """The text to write."""
        return self.write()

    @property
    def needs_getters(self) -> bool:
        """True if the expression calls a function of ``megapg.megatron.getters``."""
        return "$getters" in self.template

    def write(self, pg: str = "pg", getters: str = "getters") -> str:
        """Return the expression with other names for the two."""
        return self.template.replace("$pg", pg).replace("$getters", getters)


@dataclass(frozen=True)
class Refusal:
    """The reason why there is no replacement.

    Attributes:
        reason: a code of :data:`megapg.migrate.reasons.REASONS`.
        detail: the detail of this case; may be empty.
        is_error: True if the call itself fails in this version of Megatron-core.
    """

    reason: str
    detail: str = ""
    is_error: bool = False


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A field, and the arguments that must be true for it. The first row that fits counts.

    ``helper`` has the arguments of the function of getters (see :data:`HELPERS`) that is used
    instead, if the field is not the same in every job; a blank stands for none, and an empty string
    for no helper. With 0.19's rematerialisation the helper refuses to guess.
    """

    true: tuple[str, ...]
    field: str
    helper: str = ""


def _rows(*rows: tuple[str, str] | tuple[str, str, str]) -> tuple[_Row, ...]:
    return tuple(_Row(tuple(row[0].split()), *row[1:]) for row in rows)


_PARTIAL = "with_context_parallel=True, partial_data_parallel=True"


def _of_table() -> Mapping[str, tuple[_Row, ...]]:
    """Return the groups of each getter: the field that needs most arguments comes first."""
    rows: dict[str, list[_Row]] = {}
    for field, row in TABLE.items():
        if row.getter:
            rows.setdefault(row.getter, []).append(_Row(row.flags, field))
    return {
        middle: tuple(sorted(of_getter, key=lambda row: -len(row.true)))
        for middle, of_getter in rows.items()
    }


# The middle of a getter's name -> its groups. Below are those whose arguments mean more than the
# choice of a field, and names that some cores have besides.
ROWS: Mapping[str, tuple[_Row, ...]] = {
    **_of_table(),
    "model_parallel": _rows(("with_expert_parallel", "tp_ep_pp"), ("", "mp")),
    "data_parallel": _rows(
        ("partial_data_parallel with_gtp_remat", "intra_dp_cp", _PARTIAL),
        ("partial_data_parallel", "intra_dp_cp"),
        ("with_context_parallel independent_all_gather", "dp_cp_ag"),
        ("with_context_parallel with_gtp_remat", "dp_cp_gtp_remat"),
        ("with_context_parallel", "dp_cp"),
        ("with_gtp_remat", "dp", " "),
        ("", "dp"),
    ),
    "amax_reduction": _rows(
        ("with_context_parallel tp_only_amax_red", "tp_cp"),
        ("with_context_parallel", "tp_dp_cp"),
        ("tp_only_amax_red", "tp"),
        ("", "tp_dp"),
    ),
    "tensor_and_expert_parallel": _rows(("", "tp_ep")),
    "expert_data_parallel": _rows(
        (
            "partial_expert_data_parallel with_gtp_remat",
            "intra_expt_dp",
            "partial_expert_data_parallel=True",
        ),
        ("partial_expert_data_parallel", "intra_expt_dp"),
        ("with_gtp_remat", "expt_dp_gtp_remat"),
        ("", "expt_dp"),
    ),
    "data_modulo_expert_parallel": _rows(
        ("partial_expert_data_parallel", "intra_expt_dp"), ("", "expt_dp")
    ),
}

# Field -> the first version from whose globals a collection can read it. Before, the group did not
# exist, or had another name or other ranks.
SINCE: Mapping[str, int] = {"ep": 6, "tp_ep": 10, "tp_ep_pp": 10, "expt_dp": 10}

# The end of a getter's name -> the property, and its expression. Longer ends first.
FORMS: Mapping[str, tuple[str, str]] = {
    "_group_gloo": ("gloo", '$getters.gloo_group($pg, "{field}")'),
    "_groups": ("group", "$pg.{field}"),
    "_group": ("group", "$pg.{field}"),
    "_world_size": ("size", '$pg.size("{field}")'),
    "_src_rank": ("first", ""),
    "_global_ranks": ("ranks", 'list($pg.ranks("{field}"))'),
    "_rank": ("rank", '$pg.rank("{field}")'),
}

# The middle of a getter's name -> what the getter asks -> the function of getters that takes its
# flags unchanged.
HELPERS: Mapping[str, Mapping[str, str]] = {
    "data_parallel": {
        "group": "data_group",
        "rank": "data_rank",
        "size": "data_size",
        "first": "data_src_rank",
    },
    "expert_data_parallel": {
        "group": "expert_data_group",
        "rank": "expert_data_rank",
        "size": "expert_data_size",
    },
    "tensor_and_data_parallel": {"group": "tensor_data_group"},
    "amax_reduction": {"group": "amax_reduction_group"},
    "data_modulo_expert_parallel": {"group": "data_modulo_expert_group"},
    "tensor_model_parallel": {"first": "tensor_src_rank"},
    "model_parallel": {"first": "model_src_rank"},
    "expert_model_parallel": {"first": "expert_src_rank"},
}
# Getters whose name is not that of their field.
OTHERS_GROUPS = frozenset({"amax_reduction", "data_modulo_expert_parallel"})
FLAGS_OF_HELPERS = frozenset(
    {"with_context_parallel", "partial_data_parallel", "partial_expert_data_parallel"}
    | {"tp_only_amax_red"}
)

# Names that do not follow the pattern.
BY_NAME: Mapping[str, Replacement] = {
    # A collection answers these whatever its fields.
    **{
        name: Replacement(f"$getters.{name}($pg)", takes=Takes.OPTIONAL)
        for name in ("is_initialized", "is_unitialized", "model_parallel_is_initialized")
    },
    "get_all_ranks": Replacement("$getters.all_ranks($pg)", needs=("tp", "dp", "cp", "pp", "ep")),
    "has_separate_all_gather_group": Replacement(
        "$getters.has_separate_all_gather_group($pg)", "dp_cp_ag", needs=("dp_cp_ag",)
    ),
    **{
        f"get_pipeline_model_parallel_{which}_rank": Replacement(
            f"$getters.pipeline_{which}_rank($pg)", needs=("pp",)
        )
        for which in ("first", "last", "next", "prev")
    },
    "is_rank_in_position_embedding_group": Replacement(
        "$getters.is_rank_in_position_embedding_group($pg)", "pos_embd", needs=("pos_embd",)
    ),
    **{
        name: Replacement(f"$getters.{helper}($pg)", needs=(field,), takes=Takes.JOB)
        for name, helper, field in (
            ("get_virtual_pipeline_model_parallel_world_size", "virtual_pipeline_size", "pp"),
            ("get_global_memory_buffer", "memory_buffer", "tp"),
            ("get_pipeline_model_parallel_split_rank", "pipeline_split_rank", "pp"),
            ("get_pipeline_model_parallel_decoder_start", "pipeline_decoder_start", "pp"),
            ("is_pipeline_stage_at_split", "is_pipeline_stage_at_split", "pp"),
        )
    },
    "get_inter_partial_data_parallel_group": Replacement(
        "$getters.inter_partial_data_group($pg)",
        "inter_dist_opt",
        "group",
        needs=("inter_dist_opt",),
    ),
    **{
        f"get_{middle}_{ending}": Replacement(
            f'$getters.remat_{ask}($pg, "{field}")', field, needs=(field,)
        )
        for middle, field in (
            ("gtp_weight_remat", "gtp_remat"),
            ("expert_gtp_weight_remat", "expt_gtp_remat"),
        )
        for ending, ask in (("rank", "rank"), ("world_size", "size"))
    },
}

# Questions about the rank, or with ignore_virtual=False about one of its model chunks. Helpers have
# the same names, and the parameters of the newest version.
OF_A_STAGE: Mapping[str, str] = {
    "is_pipeline_first_stage": "pp",
    "is_pipeline_last_stage": "pp",
    "is_rank_in_embedding_group": "embd",
}
TAKES_VP_STAGE = 13

# Versions in which a rank may be in several pipelines: its encoder has fewer tensor parallel ranks
# than its decoder. Getter that then returns a list -> the helper that returns one too, for code
# that is changed by hand.
OF_SEVERAL_PIPELINES: Mapping[str, str] = {
    "get_pipeline_model_parallel_group": "pipeline_or_pipelines",
    "get_pipeline_model_parallel_next_rank": "pipeline_next_rank_or_ranks",
    "get_pipeline_model_parallel_prev_rank": "pipeline_prev_rank_or_ranks",
    "get_pipeline_model_parallel_last_rank": "pipeline_last_rank_or_ranks",
}
SEVERAL_PIPELINES = range(9, 14)

# Questions about encoder and decoder, for this stage or another. The helpers have the same names.
OF_A_SPLIT = frozenset(
    {"is_pipeline_stage_before_split", "is_pipeline_stage_after_split"}
    | {"is_inside_encoder", "is_inside_decoder"}
)

# Prefix of a name -> the reason. The first that fits counts.
REFUSED: Mapping[str, str] = {
    "initialize_model_parallel": "lifecycle",
    "destroy_model_parallel": "lifecycle",
    "create_": "lifecycle",
    "set_virtual_": "vp-stage",
    "get_virtual_pipeline_model_parallel_rank": "vp-stage",
    "set_pipeline_model_parallel_split_rank": "no-field",
    "set_": "setter",
    "get_nccl_options": "no-field",
    "overwrite_nccl_comm_cfgs": "no-field",
    "update_pg_timeout": "no-field",
    "generate_masked_orthogonal_rank_groups": "no-field",
    "default_": "no-field",
    "RankGenerator": "no-field",
    "get_moe_layer_wise_logging_tracker": "no-field",
    "get_global_symmetric_memory_buffer": "no-field",
    "destroy_global_": "no-field",
    "_MOE_": "no-field",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "no-field",
    "_set_global_": "no-field",
    "_MPU_": "setter",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": "vp-stage",
    "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK": "no-field",
    "_PIPELINE_MODEL_PARALLEL_DECODER_START": "no-field",
    "_global_process_group_list": "lifecycle",
    "_DATA_MODULO_EXPERT_PARALLEL_GROUP": "no-field",
    "_TENSOR_AND_EXPERT_PARALLEL_GROUP": "no-field",
}

OPTIONAL_FIELDS = frozenset(f for f, row in TABLE.items() if row.may_be_none and row.getter)
"""Fields whose getter may return None."""

# private global -> the field whose global ranks it lists
RANK_GLOBALS: Mapping[str, str] = {r.listed_in: f for f, r in TABLE.items() if r.listed_in}

# other private global -> its replacement
OTHER_GLOBALS: Mapping[str, Replacement] = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": Replacement(
        "$getters.data_group($pg)", caution="may-be-none", needs=("dp",)
    ),
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": Replacement(
        f"$getters.data_group($pg, {_PARTIAL})", caution="may-be-none", needs=("intra_dp_cp",)
    ),
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": Replacement(
        "$getters.expert_data_group($pg, partial_expert_data_parallel=True)",
        caution="may-be-none",
        needs=("intra_expt_dp",),
    ),
    "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": Replacement(
        "$getters.inter_partial_data_group($pg, check_initialized=False)",
        "inter_dist_opt",
        needs=("inter_dist_opt",),
        takes=Takes.LAZY,
    ),
    **{
        name: Replacement(f"$getters.{helper}($pg)", caution="may-be-none", takes=Takes.GLOBALS)
        for name, helper in (
            ("_EMBEDDING_GLOBAL_RANKS", "embedding_ranks"),
            ("_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", "virtual_pipeline_size"),
            ("_GLOBAL_MEMORY_BUFFER", "memory_buffer"),
        )
    },
    **{
        f"_{name}_GLOO": Replacement(
            f'$getters.gloo_group($pg, "{field}")', caution="may-be-none", takes=Takes.GLOBALS
        )
        for name, field in (
            ("DATA_PARALLEL_GROUP", "dp"),
            ("DATA_PARALLEL_GROUP_WITH_CP", "dp_cp"),
            ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "intra_dp_cp"),
            ("EXPERT_DATA_PARALLEL_GROUP", "expt_dp"),
            ("INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", "intra_expt_dp"),
        )
    },
}

PRIVATE = frozenset(
    {*GROUP_GLOBALS, *RANK_GLOBALS, *OTHER_GLOBALS, "_HYBRID_DP_CP_GROUPS"}
    | {name for name in REFUSED if name.startswith("_") and not name.endswith("_")}
)
"""Private names that code outside of Megatron-core reads, as far as they are known by name."""

# Parameter or attribute of a function, in the cores and similar code -> the fields whose group it
# may hold. ``<field>_group`` holds the field's group. The entries below are wider or have another
# name. Names that hold different groups in different places are left out: group, process_group,
# reduce_group, data_parallel_group, parallelization_group.
GROUP_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    **{f"{field}_group": (field,) for field in FIELDS if field != "hcp"},
    "tp_group": ("tp", "expt_tp"),  # experts are built from the same layers
    "dp_group": ("dp", "dp_cp", "dp_cp_gtp_remat"),
    "dp_cp_group": ("dp_cp", "dp_cp_gtp_remat"),
    "gtp_remat_group": ("gtp_remat", "expt_gtp_remat"),
    "expert_tp_group": ("expt_tp",),
    "model_parallel_group": ("mp", "tp_ep_pp", "tp_ep_pp_with_egtp_remat"),  # of either optimizer
    "pos_emb_group": ("pos_embd",),
}

ANY_GROUP = ("group", "process_group")
"""Parameters that hold any group that the caller chooses."""


COLLECTION_NAMES = ("pg_collection", "_pg_collection", "model_comm_pgs", "grad_comm_pgs")
"""Names of parameters and attributes that hold a collection, 0.13 and 0.14 included."""

MODEL_ATTRIBUTES = (
    *("unwrapped_models", "wrapped_models", "model_chunks", "models", "model", "module"),
)
"""Names under which a wrapper, a trainer or an engine holds its model. ``megapg.groups_of()``
searches them, the last one first.
"""
