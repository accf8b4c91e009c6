"""Functions for values of ``parallel_state`` that exist up to Megatron-core 0.13.

Up to then an encoder could have separate stages, and a rank could be in several pipelines. These
functions are part of :mod:`megapg.megatron.getters`.
"""

from __future__ import annotations

from typing import cast, overload

from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.megatron.getters.asking import (
    asks,
    can_be_asked,
    is_the_globals_pipeline,
    present_group,
    view_of,
)
from megapg.megatron.reading.global_groups import GlobalGroups, held_now

__all__ = [
    "inter_partial_data_group",
    "is_inside_decoder",
    "is_inside_encoder",
    "is_pipeline_stage_after_split",
    "is_pipeline_stage_at_split",
    "is_pipeline_stage_before_split",
    "pipeline_decoder_start",
    "pipeline_last_rank_or_ranks",
    "pipeline_next_rank_or_ranks",
    "pipeline_or_pipelines",
    "pipeline_prev_rank_or_ranks",
    "pipeline_split_rank",
]

_SPLIT_RANK = "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK"
_DECODER_START = "_PIPELINE_MODEL_PARALLEL_DECODER_START"

_INTER_PARTIAL = "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"  # up to 0.12


@asks("get_pipeline_model_parallel_group")
def pipeline_or_pipelines(pg: ProcessGroupCollection) -> ProcessGroup | list[ProcessGroup]:
    """Return ``get_pipeline_model_parallel_group()``, for code that accepts a list.

    This is the group. For a rank in several pipelines it is a list of all of them, from the
    globals: no field can hold them. Up to Megatron-core 0.13 there are such ranks, if an encoder
    has fewer tensor parallel ranks than its decoder. ``pg.pp`` raises there.
    """
    return pg.pp


@asks("get_pipeline_model_parallel_next_rank")
def pipeline_next_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """Return ``get_pipeline_model_parallel_next_rank()``: a rank, or one for each pipeline."""
    return pg.ranks("pp")[(pg.rank("pp") + 1) % pg.size("pp")]


@asks("get_pipeline_model_parallel_prev_rank")
def pipeline_prev_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """Return ``get_pipeline_model_parallel_prev_rank()``: a rank, or one for each pipeline."""
    return pg.ranks("pp")[(pg.rank("pp") - 1) % pg.size("pp")]


@asks("get_pipeline_model_parallel_last_rank")
def pipeline_last_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """Return ``get_pipeline_model_parallel_last_rank()``: a rank, or one for each pipeline."""
    return pg.ranks("pp")[pg.size("pp") - 1]


def pipeline_split_rank(pg: ProcessGroupCollection) -> int | None:
    """Return ``get_pipeline_model_parallel_split_rank()``: the first stage of the decoder, or None.

    For borrowed groups, the globals answer if the pipeline is theirs. All other collections, and
    Megatron-core from 0.14 on, have no such split. The same holds for the functions below.
    """
    return _of_split(pg, "get_pipeline_model_parallel_split_rank", _SPLIT_RANK)


def pipeline_decoder_start(pg: ProcessGroupCollection) -> int | None:
    """Return ``get_pipeline_model_parallel_decoder_start()``: the first stage of the decoder.

    None if the encoder has no separate stages.
    """
    return _of_split(pg, "get_pipeline_model_parallel_decoder_start", _DECODER_START)


@asks("is_pipeline_stage_before_split")
def is_pipeline_stage_before_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if a stage runs the encoder, as ``is_pipeline_stage_before_split()``.

    The stage is ``rank``. Default: this rank's.
    """
    split, stage = pipeline_split_rank(pg), _one_of_several(pg, rank)
    return split is None or stage is None or stage < split


@asks("is_pipeline_stage_after_split")
def is_pipeline_stage_after_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if the stage ``rank`` runs the decoder, as ``is_pipeline_stage_after_split()``."""
    split, stage = pipeline_split_rank(pg), _one_of_several(pg, rank)
    return split is None or stage is None or stage >= split


@asks("is_pipeline_stage_at_split")
def is_pipeline_stage_at_split(pg: ProcessGroupCollection) -> bool:
    """True if this stage is the encoder's last, as ``is_pipeline_stage_at_split()``."""
    rank = pg.rank("pp")
    return is_pipeline_stage_before_split(pg, rank) and is_pipeline_stage_after_split(pg, rank + 1)


@asks("is_inside_encoder")
def is_inside_encoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if a stage runs the encoder, as ``is_inside_encoder()``.

    The stage is ``rank``. Default: this rank's. If the encoder has no separate stages, the first
    stage runs it.
    """
    start, stage = pipeline_decoder_start(pg), _one_of_several(pg, rank)
    if stage is None:
        return True
    if start is None:
        return stage == 0
    return stage < start


@asks("is_inside_decoder")
def is_inside_decoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if the stage ``rank`` runs the decoder, as ``is_inside_decoder()``."""
    start, stage = pipeline_decoder_start(pg), _one_of_several(pg, rank)
    return start is None or stage is None or stage >= start


def _of_split(pg: ProcessGroupCollection, getter: str, variable: str) -> int | None:
    if not is_the_globals_pipeline(pg):
        return None
    asked = can_be_asked(getter)
    return cast(int | None, view_of(pg).ask(getter) if asked else view_of(pg).read(variable))


def _one_of_several(pg: ProcessGroupCollection, given: int | None) -> int | None:
    """Return the stage in question; None in a pipeline of one stage, which does everything."""
    if pg.size("pp") == 1:
        return None
    return pg.rank("pp") if given is None else given


@overload
def inter_partial_data_group(pg: ProcessGroupCollection) -> ProcessGroup: ...


@overload
def inter_partial_data_group(
    pg: ProcessGroupCollection, *, check_initialized: bool
) -> ProcessGroup | None: ...


def inter_partial_data_group(
    pg: ProcessGroupCollection, *, check_initialized: bool = True
) -> ProcessGroup | None:
    """Return ``get_inter_partial_data_parallel_group()`` of 0.10 to 0.12: ``inter_dist_opt``.

    Those versions have a variable of another name for it. Otherwise as
    :func:`~megapg.megatron.getters.present_group`.
    """
    if isinstance(pg, GlobalGroups):
        getter = "get_inter_partial_data_parallel_group"
        if check_initialized and can_be_asked(getter):
            return cast(ProcessGroup, pg.ask(getter))
        if held_now(_INTER_PARTIAL):
            return cast(ProcessGroup, pg.read(_INTER_PARTIAL))
    return present_group(pg, "inter_dist_opt", check_initialized=check_initialized)
