"""What ``parallel_state`` answers up to Megatron-core 0.13 and no field holds.

Up to then an encoder could have stages of its own, and a rank could be in several pipelines. These
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
    """For ``get_pipeline_model_parallel_group()`` of code that can do with a list: the group; in
    the globals of a rank in several pipelines, which no field can hold, all of them.

    Up to Megatron-core 0.13 there are such ranks, where an encoder has fewer tensor parallel ranks
    than its decoder. ``pg.pp`` raises there.
    """
    return pg.pp


@asks("get_pipeline_model_parallel_next_rank")
def pipeline_next_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """For ``get_pipeline_model_parallel_next_rank()`` of such code: a rank for each pipeline."""
    return pg.ranks("pp")[(pg.rank("pp") + 1) % pg.size("pp")]


@asks("get_pipeline_model_parallel_prev_rank")
def pipeline_prev_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """For ``get_pipeline_model_parallel_prev_rank()`` of such code: a rank for each pipeline."""
    return pg.ranks("pp")[(pg.rank("pp") - 1) % pg.size("pp")]


@asks("get_pipeline_model_parallel_last_rank")
def pipeline_last_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """For ``get_pipeline_model_parallel_last_rank()`` of such code: a rank for each pipeline."""
    return pg.ranks("pp")[pg.size("pp") - 1]


def pipeline_split_rank(pg: ProcessGroupCollection) -> int | None:
    """For ``get_pipeline_model_parallel_split_rank()``: the first stage of the decoder, or None.

    Of a collection of borrowed groups the globals know where its pipeline is theirs. No other has
    such a split, nor have those of Megatron-core from 0.14 on. The same holds for what follows
    here.
    """
    return _of_split(pg, "get_pipeline_model_parallel_split_rank", _SPLIT_RANK)


def pipeline_decoder_start(pg: ProcessGroupCollection) -> int | None:
    """For ``get_pipeline_model_parallel_decoder_start()``: the first stage of the decoder, where
    the encoder has stages of its own, or None.
    """
    return _of_split(pg, "get_pipeline_model_parallel_decoder_start", _DECODER_START)


@asks("is_pipeline_stage_before_split")
def is_pipeline_stage_before_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_pipeline_stage_before_split()``: whether the stage ``rank`` (this rank's unless
    given) runs the encoder.
    """
    split, stage = pipeline_split_rank(pg), _one_of_several(pg, rank)
    return split is None or stage is None or stage < split


@asks("is_pipeline_stage_after_split")
def is_pipeline_stage_after_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_pipeline_stage_after_split()``: whether the stage ``rank`` runs the decoder."""
    split, stage = pipeline_split_rank(pg), _one_of_several(pg, rank)
    return split is None or stage is None or stage >= split


@asks("is_pipeline_stage_at_split")
def is_pipeline_stage_at_split(pg: ProcessGroupCollection) -> bool:
    """For ``is_pipeline_stage_at_split()``: whether this stage is the encoder's last."""
    rank = pg.rank("pp")
    return is_pipeline_stage_before_split(pg, rank) and is_pipeline_stage_after_split(pg, rank + 1)


@asks("is_inside_encoder")
def is_inside_encoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_inside_encoder()``: whether the stage ``rank`` (this rank's unless given) runs the
    encoder. Where the encoder has no stages of its own, that is the first.
    """
    start, stage = pipeline_decoder_start(pg), _one_of_several(pg, rank)
    if stage is None:
        return True
    if start is None:
        return stage == 0
    return stage < start


@asks("is_inside_decoder")
def is_inside_decoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_inside_decoder()``: whether the stage ``rank`` runs the decoder."""
    start, stage = pipeline_decoder_start(pg), _one_of_several(pg, rank)
    return start is None or stage is None or stage >= start


def _of_split(pg: ProcessGroupCollection, getter: str, variable: str) -> int | None:
    if not is_the_globals_pipeline(pg):
        return None
    asked = can_be_asked(getter)
    return cast(int | None, view_of(pg).ask(getter) if asked else view_of(pg).read(variable))


def _one_of_several(pg: ProcessGroupCollection, given: int | None) -> int | None:
    """The stage that is asked about; None in a pipeline of one, which does everything."""
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
    """For ``get_inter_partial_data_parallel_group()`` of 0.10 to 0.12: ``inter_dist_opt``, for
    which those versions have a variable of another name. Otherwise as
    :func:`~megapg.megatron.getters.present_group`.
    """
    if isinstance(pg, GlobalGroups):
        getter = "get_inter_partial_data_parallel_group"
        if check_initialized and can_be_asked(getter):
            return cast(ProcessGroup, pg.ask(getter))
        if held_now(_INTER_PARTIAL):
            return cast(ProcessGroup, pg.read(_INTER_PARTIAL))
    return present_group(pg, "inter_dist_opt", check_initialized=check_initialized)
