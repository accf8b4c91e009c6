"""The replacement to write for a read of Megatron's globals that has just happened.

It is the codemod's, from its table; here the values of all arguments are known. In it ``pg`` is the
collection, ``getters`` is :mod:`megapg.megatron.getters`, and ``vp_stage`` the model chunk that the
caller works on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megapg.megatron.core import installed_version
from megapg.megatron.tables import GROUP_GLOBALS, HYBRID_GROUPS
from megapg.upstream import expressions
from megapg.upstream.mapping import RANK_GLOBALS, Argument, Refusal
from megapg.upstream.signatures import VERSIONS, signature


@dataclass(frozen=True)
class Replacement:
    """The replacement of one read."""

    field: str  # the collection's field; empty if the read names no group
    write: str  # the expression to write; empty for a name that no supported core has


NOTHING_KNOWN = Replacement("", "")

# Named like a getter, but it reads no global.
NOT_READS = frozenset({"get_nccl_options"})

_HYBRID = "get_hybrid_data_context_parallel_groups"
# Replacements that the codemod can't find from source alone.
_BY_HAND: Mapping[str, str] = {
    "get_virtual_pipeline_model_parallel_rank": "vp_stage",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": "vp_stage",
    "get_global_symmetric_memory_buffer": "a symmetric buffer of your own",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER": "a symmetric buffer of your own",
    _HYBRID: "getters.hybrid_group(pg, size)",
    HYBRID_GROUPS: "getters.hybrid_group(pg, size)",
    "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK": "getters.pipeline_split_rank(pg)",
    "_PIPELINE_MODEL_PARALLEL_DECODER_START": "getters.pipeline_decoder_start(pg)",
    "_DATA_MODULO_EXPERT_PARALLEL_GROUP": "getters.data_modulo_expert_group(pg)",
}

COLLECTION_PARAMETER = "pg_collection"

# If a function is called with is_expert, its tp_group is the experts'. The default proves nothing:
# the cores pass the experts' group to functions with that flag at its default.
EXPERT_FLAG = "is_expert"
TP_GROUP_OF_EXPERTS = ("expt_tp",)


def replacement(name: str, arguments: Mapping[str, object]) -> Replacement:
    """Return the replacement for a read of ``name``, a private global or a getter.

    ``arguments`` are all arguments of the getter, defaults included.
    """
    version = min(installed_version()[1], VERSIONS[-1])
    # The variable holds a value, so unlike the codemod this code need not check that.
    if name in GROUP_GLOBALS:
        return Replacement(GROUP_GLOBALS[name], f"pg.{GROUP_GLOBALS[name]}")
    if name in RANK_GLOBALS:
        return Replacement(RANK_GLOBALS[name], f'pg.ranks("{RANK_GLOBALS[name]}")')
    # _MPU_TENSOR_MODEL_PARALLEL_RANK and similar names correspond to the getter of that name.
    getter = f"get{name.removeprefix('_MPU').lower()}" if name.startswith("_MPU_") else name
    found = expressions.replacement(getter, _written(getter, arguments, version), (version,))
    for changed in ({"check_initialized": True}, {"with_context_parallel": True}):
        if isinstance(found, Refusal):  # also for a call that the getter itself refuses
            others = _written(getter, {**arguments, **changed}, version)
            found = expressions.replacement(getter, others, (version,))
    if isinstance(found, Refusal):
        return Replacement("", _BY_HAND.get(getter, ""))
    field = found.field or ", ".join(found.needs)
    if getter == _HYBRID:
        field = f"hybrid.{arguments['group_size']}"
    return Replacement(f"gloo.{field}" if found.asks == "gloo" else field, found.expression)


def _written(name: str, arguments: Mapping[str, object], version: int) -> list[Argument]:
    """Return the arguments that differ from their defaults, as source text."""
    texts = {key: repr(value) for key, value in arguments.items()}
    if texts.get("ignore_virtual") == "False" and "vp_stage" in texts:
        texts["vp_stage"] = "vp_stage"
    return [
        Argument(texts[each.name], each.name)
        for each in signature(name, version) or ()
        if texts.get(each.name, each.default) != each.default
    ]
