"""What Megatron-core's getters answer and no field holds, as functions of the groups.

A project gets those that it uses.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

from megapg.megatron.vendored.process_groups import (
    _FIELDS,
    MissingGroupError,
    ProcessGroupCollection,
    _getter,
    _globals,
    _is_of_globals,
    _takes,
    resolve,
)

# -- whether there are groups ----------------------------------------------------------------------


def is_initialized(pg_collection: object) -> bool:
    """For ``is_initialized()``: whether there are groups, in what was passed or in the globals."""
    return _has_groups(pg_collection, "is_initialized")


def is_unitialized(pg_collection: object) -> bool:
    """For ``is_unitialized()``: the opposite of :func:`is_initialized`."""
    return not is_initialized(pg_collection)


def model_parallel_is_initialized(pg_collection: object) -> bool:
    """For ``model_parallel_is_initialized()``: whether there are groups; of the globals also
    those of tensor and pipeline parallelism.
    """
    return _has_groups(pg_collection, "model_parallel_is_initialized")


def _has_groups(pg_collection: object, getter: str) -> bool:
    passed = resolve(pg_collection).passed
    if passed is not None and any(getattr(passed, field, None) is not None for field in _FIELDS):
        return True
    # Where nobody has imported Megatron-core nobody has initialised it.
    return "megatron.core" in sys.modules and bool(getattr(_globals(), getter)())


# -- groups, and numbers of them -------------------------------------------------------------------


def present_group(pg: ProcessGroupCollection, field: str, *, check_initialized: bool = True) -> Any:
    """The group of a field, and an error in place of None, which torch would take for WORLD.

    Without ``check_initialized`` it is None where there is no group.
    """
    found = getattr(pg, field, None)
    if found is None and check_initialized:
        pg.ranks(field)  # knows what to say
    return found


def hierarchical_groups(pg: ProcessGroupCollection, *, check_initialized: bool = True) -> Any:
    """For ``get_hierarchical_context_parallel_groups()``: the groups of the levels, a list."""
    if pg.passed is None:
        getter = _globals().get_hierarchical_context_parallel_groups
        flag = {"check_initialized": False} if not check_initialized else {}
        return getter(**flag) if _takes(getter, *flag) else getter()
    found = present_group(pg, "hcp", check_initialized=check_initialized)
    return None if found is None else list(found)


def tensor_src_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_tensor_model_parallel_src_rank()``: global rank of the group's first."""
    if pg.passed is None:
        return cast(int, _globals().get_tensor_model_parallel_src_rank())
    return pg.ranks("tp")[0]


def model_src_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_model_parallel_src_rank()``: global rank of the group's first."""
    if pg.passed is None:
        return cast(int, _globals().get_model_parallel_src_rank())
    return pg.ranks("mp")[0]


def data_src_rank(pg: ProcessGroupCollection, **flags: bool) -> int:
    """For ``get_data_parallel_src_rank()``: global rank of the group's first."""
    if pg.passed is None:
        return cast(int, _globals().get_data_parallel_src_rank(**flags))
    return pg.ranks(_data_field(**flags))[0]


def expert_src_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_expert_model_parallel_src_rank()``: global rank of the group's first."""
    if pg.passed is None:
        return cast(int, _globals().get_expert_model_parallel_src_rank())
    return pg.ranks("ep")[0]


def data_group(pg: ProcessGroupCollection, **flags: bool) -> Any:
    """For ``get_data_parallel_group()`` with flags that are known at run time only."""
    _refuse(pg, "gtp_remat")
    if pg.passed is None:
        return _globals().get_data_parallel_group(**flags)
    return getattr(pg, _data_field(**flags))


def data_rank(pg: ProcessGroupCollection, **flags: bool) -> int:
    """For ``get_data_parallel_rank()`` with such flags."""
    _refuse(pg, "gtp_remat")
    if pg.passed is None:
        return cast(int, _globals().get_data_parallel_rank(**flags))
    return pg.rank(_data_field(**flags))


def data_size(pg: ProcessGroupCollection, **flags: bool) -> int:
    """For ``get_data_parallel_world_size()`` with such flags."""
    _refuse(pg, "gtp_remat")
    if pg.passed is None:
        return cast(int, _globals().get_data_parallel_world_size(**flags))
    return pg.size(_data_field(**flags))


def _data_field(*, with_context_parallel: bool = False, partial_data_parallel: bool = False) -> str:
    if not with_context_parallel:
        if partial_data_parallel:
            raise ValueError("partial_data_parallel needs with_context_parallel=True as well.")
        return "dp"
    return "intra_dp_cp" if partial_data_parallel else "dp_cp"


def _refuse(pg: ProcessGroupCollection, remat: str) -> None:
    """Where weights are rematerialised over a field there are two groups to choose from."""
    group = getattr(pg, remat, None)
    if group is not None and group.size() > 1:
        raise ValueError(f"with {remat} there are two such groups: take a field of pg.")


def expert_data_group(pg: ProcessGroupCollection, **flags: bool) -> Any:
    """For ``get_expert_data_parallel_group()`` with a flag that is known at run time only."""
    _refuse(pg, "expt_gtp_remat")
    if pg.passed is None:
        return _globals().get_expert_data_parallel_group(**flags)
    return getattr(pg, _expert_data_field(**flags))


def expert_data_rank(pg: ProcessGroupCollection, **flags: bool) -> int:
    """For ``get_expert_data_parallel_rank()`` with such a flag."""
    _refuse(pg, "expt_gtp_remat")
    if pg.passed is None:
        return cast(int, _globals().get_expert_data_parallel_rank(**flags))
    return pg.rank(_expert_data_field(**flags))


def expert_data_size(pg: ProcessGroupCollection, **flags: bool) -> int:
    """For ``get_expert_data_parallel_world_size()`` with such a flag."""
    _refuse(pg, "expt_gtp_remat")
    if pg.passed is None:
        return cast(int, _globals().get_expert_data_parallel_world_size(**flags))
    return pg.size(_expert_data_field(**flags))


def _expert_data_field(*, partial_expert_data_parallel: bool = False) -> str:
    return "intra_expt_dp" if partial_expert_data_parallel else "expt_dp"


def data_modulo_expert_group(pg: ProcessGroupCollection, **flags: bool) -> Any:
    """For ``get_data_modulo_expert_parallel_group()``, which there is up to 0.16."""
    if pg.passed is None:
        return _globals().get_data_modulo_expert_parallel_group(**flags)
    return getattr(pg, _expert_data_field(**flags))


def tensor_data_group(pg: ProcessGroupCollection, **flags: bool) -> Any:
    """For ``get_tensor_and_data_parallel_group()`` with such a flag."""
    if pg.passed is None:
        return _globals().get_tensor_and_data_parallel_group(**flags)
    return pg.tp_dp_cp if flags.get("with_context_parallel") else pg.tp_dp


def amax_reduction_group(pg: ProcessGroupCollection, **flags: bool) -> Any:
    """For ``get_amax_reduction_group()``: over which FP8 scaling factors are agreed."""
    if pg.passed is None:
        return _globals().get_amax_reduction_group(**flags)
    field = "tp" if flags.get("tp_only_amax_red") else "tp_dp"
    return getattr(pg, f"{field}_cp" if flags.get("with_context_parallel") else field)


def has_separate_all_gather_group(pg: ProcessGroupCollection) -> bool:
    """For ``has_separate_all_gather_group()``: whether ``dp_cp_ag`` is a group of its own."""
    if pg.passed is None:
        return cast(bool, _globals().has_separate_all_gather_group())
    return getattr(pg, "dp_cp_ag", None) is not None


def remat_rank(pg: ProcessGroupCollection, field: str) -> int:
    """For ``get_gtp_weight_remat_rank()`` and the experts' one: 0 where there is no group."""
    return pg.rank(field) if _counts_remat(pg, field) else 0


def remat_size(pg: ProcessGroupCollection, field: str) -> int:
    """For ``get_gtp_weight_remat_world_size()`` and the experts' one, likewise."""
    return pg.size(field) if _counts_remat(pg, field) else 0


def _counts_remat(pg: ProcessGroupCollection, field: str) -> bool:
    getter = _getter(field, "world_size") if pg.passed is None else None
    return getter is not None or getattr(pg, field) is not None


def gloo_group(pg: ProcessGroupCollection, field: str) -> Any:
    """For the ``..._gloo()`` getters: the gloo companion that the globals have of a group."""
    if not _is_of_globals(pg, field):
        raise MissingGroupError(f"the globals have no gloo companion of the {field} passed.")
    getter = _getter(field, "group_gloo")
    if getter is None:
        raise MissingGroupError(f"this Megatron-core has no gloo companion of {field}.")
    return getter()


def hybrid_group(pg: ProcessGroupCollection, size: int) -> Any:
    """For ``get_hybrid_data_context_parallel_groups(group_size=size)``."""
    if pg.passed is None:
        return _globals().get_hybrid_data_context_parallel_groups(group_size=size)
    if size != pg.size("dp_cp"):
        raise MissingGroupError(f"a collection has no hybrid group of {size} ranks.")
    return pg.dp_cp


def all_ranks(pg: ProcessGroupCollection) -> str:
    """For ``get_all_ranks()``: this rank's place on the axes, such as ``1_0_0_2_0``; from 0.19 on
    the second is that of rematerialised weights.
    """
    _refuse(pg, "gtp_remat")
    if pg.passed is None:
        return cast(str, _globals().get_all_ranks())
    ranks = [pg.rank(field) for field in ("tp", "dp", "cp", "pp", "ep")]
    if hasattr(_globals(), "get_gtp_weight_remat_rank"):
        ranks.insert(1, 0)
    return "_".join(map(str, ranks))


def memory_buffer(pg: ProcessGroupCollection) -> Any:
    """For ``get_global_memory_buffer()``: scratch memory that calls of the same name share. There
    is one for each collection whose groups are not the globals'.
    """
    if _is_of_globals(pg, "tp"):
        return _globals().get_global_memory_buffer()
    held = vars(pg.passed)
    if "_memory_buffer" not in held:
        core = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer
        # What is allocated under inference_mode can't be part of a backward pass ever after.
        ordinary = importlib.import_module("torch").inference_mode(False)(core.get_tensor)
        held["_memory_buffer"] = type(core.__name__, (core,), {"get_tensor": ordinary})()
    return held["_memory_buffer"]


def inter_partial_data_group(pg: ProcessGroupCollection, *, check_initialized: bool = True) -> Any:
    """For ``get_inter_partial_data_parallel_group()`` of 0.10 to 0.12: ``inter_dist_opt``, for
    which those have a variable of another name.
    """
    if pg.passed is None:
        state = _globals()
        if check_initialized and hasattr(state, "get_inter_partial_data_parallel_group"):
            return state.get_inter_partial_data_parallel_group()
        if found := getattr(state, "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", None):
            return found
    return present_group(pg, "inter_dist_opt", check_initialized=check_initialized)


# -- stages of the pipeline ------------------------------------------------------------------------


def virtual_pipeline_size(pg: ProcessGroupCollection) -> int | None:
    """For ``get_virtual_pipeline_model_parallel_world_size()``: model chunks on a rank, or None."""
    return cast("int | None", _of_job(pg).get_virtual_pipeline_model_parallel_world_size())


def is_pipeline_first_stage(pg: ProcessGroupCollection, **chunk: Any) -> bool:
    """For ``is_pipeline_first_stage()``, whose arguments say if a model chunk is meant."""
    if pg.passed is None or chunk.get("ignore_virtual") is False:
        return cast(bool, _of_job(pg).is_pipeline_first_stage(**chunk))
    return pg.rank("pp") == 0


def is_pipeline_last_stage(pg: ProcessGroupCollection, **chunk: Any) -> bool:
    """For ``is_pipeline_last_stage()``, whose arguments say if a model chunk is meant."""
    if pg.passed is None or chunk.get("ignore_virtual") is False:
        return cast(bool, _of_job(pg).is_pipeline_last_stage(**chunk))
    return pg.rank("pp") == pg.size("pp") - 1


def _of_job(pg: ProcessGroupCollection) -> Any:
    """The globals, where the pipeline is theirs: no group tells of the chunks in a stage."""
    if not _is_of_globals(pg, "pp"):
        raise ValueError("the pp passed does not tell of model chunks: pass ignore_virtual=True.")
    return _globals()


def is_rank_in_embedding_group(pg: ProcessGroupCollection, **chunk: Any) -> bool:
    """For ``is_rank_in_embedding_group()``: whether this rank holds the word embeddings."""
    if pg.passed is None or chunk.get("ignore_virtual") is False:
        return cast(bool, _of_job(pg).is_rank_in_embedding_group(**chunk))
    return pg.embd is not None


def is_rank_in_position_embedding_group(pg: ProcessGroupCollection) -> bool:
    """For ``is_rank_in_position_embedding_group()``: whether this rank holds those."""
    if pg.passed is None:
        return cast(bool, _globals().is_rank_in_position_embedding_group())
    return pg.pos_embd is not None


def embedding_ranks(pg: ProcessGroupCollection) -> list[int]:
    """For ``_EMBEDDING_GLOBAL_RANKS``: global ranks of the group, in the order of their choice."""
    chosen = getattr(_globals(), "_EMBEDDING_GLOBAL_RANKS", None)
    return list(pg.ranks("embd") if pg.passed is not None or chosen is None else chosen)


def pipeline_first_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_first_rank()``: global rank of the first stage."""
    if pg.passed is None:
        return cast(int, _globals().get_pipeline_model_parallel_first_rank())
    return pg.ranks("pp")[0]


def pipeline_last_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_last_rank()``: global rank of the last stage."""
    if pg.passed is None:
        return cast(int, _globals().get_pipeline_model_parallel_last_rank())
    return pg.ranks("pp")[-1]


def pipeline_next_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_next_rank()``: after the last comes the first."""
    if pg.passed is None:
        return cast(int, _globals().get_pipeline_model_parallel_next_rank())
    return pg.ranks("pp")[(pg.rank("pp") + 1) % pg.size("pp")]


def pipeline_prev_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_prev_rank()``: before the first comes the last."""
    if pg.passed is None:
        return cast(int, _globals().get_pipeline_model_parallel_prev_rank())
    return pg.ranks("pp")[(pg.rank("pp") - 1) % pg.size("pp")]


def pipeline_split_rank(pg: ProcessGroupCollection) -> int | None:
    """For ``get_pipeline_model_parallel_split_rank()``: the first stage of the decoder, or None."""
    return cast("int | None", _of_split(pg, "get_pipeline_model_parallel_split_rank", None))


def pipeline_decoder_start(pg: ProcessGroupCollection) -> int | None:
    """For ``get_pipeline_model_parallel_decoder_start()``, if the encoder has separate stages."""
    return cast("int | None", _of_split(pg, "get_pipeline_model_parallel_decoder_start", None))


def is_pipeline_stage_before_split(pg: ProcessGroupCollection, *, rank: int | None = None) -> bool:
    """For ``is_pipeline_stage_before_split()``: True if a stage runs the encoder."""
    return bool(_of_split(pg, "is_pipeline_stage_before_split", True, rank=rank))


def is_pipeline_stage_after_split(pg: ProcessGroupCollection, *, rank: int | None = None) -> bool:
    """For ``is_pipeline_stage_after_split()``: True if a stage runs the decoder."""
    return bool(_of_split(pg, "is_pipeline_stage_after_split", True, rank=rank))


def is_pipeline_stage_at_split(pg: ProcessGroupCollection) -> bool:
    """For ``is_pipeline_stage_at_split()``: True if this stage is the encoder's last."""
    return bool(_of_split(pg, "is_pipeline_stage_at_split", True))


def is_inside_encoder(pg: ProcessGroupCollection, *, rank: int | None = None) -> bool:
    """For ``is_inside_encoder()``: True if a stage runs the encoder. If the encoder has no separate
    stages, this is the first stage.
    """
    found = _of_split(pg, "is_inside_encoder", None, rank=rank)
    if found is None:
        return pg.size("pp") == 1 or (pg.rank("pp") if rank is None else rank) == 0
    return bool(found)


def is_inside_decoder(pg: ProcessGroupCollection, *, rank: int | None = None) -> bool:
    """For ``is_inside_decoder()``: True if a stage runs the decoder."""
    return bool(_of_split(pg, "is_inside_decoder", True, rank=rank))


def _of_split(
    pg: ProcessGroupCollection, name: str, without: object, **arguments: object
) -> object:
    """The getter's answer if the pipeline is the globals', else ``without``: other pipelines, and
    Megatron-core from 0.14 on, have no separate stages for encoders.
    """
    getter = getattr(_globals(), name, None) if _is_of_globals(pg, "pp") else None
    return without if getter is None else getter(**arguments)
