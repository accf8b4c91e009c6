"""Functions for values of ``parallel_state`` that exist up to Megatron-core 0.13.

Up to then an encoder could have separate stages, and a rank could be in several pipelines. These
functions are part of :mod:`megapg.megatron.getters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.megatron.getters.asking import (
    ask,
    can_be_asked,
    is_held,
    is_the_globals,
    present_group,
    read,
    reads_globals,
)
from megapg.megatron.getters.asks import asks
from megapg.megatron.getters.stages import (
    pipeline_last_rank,
    pipeline_next_rank,
    pipeline_prev_rank,
)

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

_INTER_PARTIAL = "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"  # up to 0.12


@asks("get_pipeline_model_parallel_group")
def pipeline_or_pipelines(pg: ProcessGroupCollection) -> ProcessGroup | list[ProcessGroup]:
    """Return ``get_pipeline_model_parallel_group()``, for code that accepts a list.

    This is the group. For a rank in several pipelines it is a list of all of them, from the
    globals: no field can hold them. Up to Megatron-core 0.13 there are such ranks, if an encoder
    has fewer tensor parallel ranks than its decoder. ``pg.pp`` raises there.
    """
    return pg.pp


# The same functions, typed for code that accepts a rank for each pipeline.
_RankOrRanks = Callable[[ProcessGroupCollection], int | list[int]]
pipeline_next_rank_or_ranks: _RankOrRanks = pipeline_next_rank
pipeline_prev_rank_or_ranks: _RankOrRanks = pipeline_prev_rank
pipeline_last_rank_or_ranks: _RankOrRanks = pipeline_last_rank


def pipeline_split_rank(pg: ProcessGroupCollection) -> int | None:
    """Return ``get_pipeline_model_parallel_split_rank()``: the decoder's first stage, or None.

    For borrowed groups, the globals answer if the pipeline is theirs. All other collections, and
    Megatron-core from 0.14 on, have no such split. The same holds for the functions below.
    """
    return cast("int | None", _of_split(pg, "get_pipeline_model_parallel_split_rank", None))


def pipeline_decoder_start(pg: ProcessGroupCollection) -> int | None:
    """Return ``get_pipeline_model_parallel_decoder_start()``: the first stage of the decoder.

    None if the encoder has no separate stages.
    """
    return cast("int | None", _of_split(pg, "get_pipeline_model_parallel_decoder_start", None))


def is_pipeline_stage_before_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if a stage runs the encoder, as ``is_pipeline_stage_before_split()``.

    The stage is ``rank``. Default: this rank's.
    """
    return bool(_of_split(pg, "is_pipeline_stage_before_split", True, rank=rank))


def is_pipeline_stage_after_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if the stage ``rank`` runs the decoder, as ``is_pipeline_stage_after_split()``."""
    return bool(_of_split(pg, "is_pipeline_stage_after_split", True, rank=rank))


def is_pipeline_stage_at_split(pg: ProcessGroupCollection) -> bool:
    """True if this stage is the encoder's last, as ``is_pipeline_stage_at_split()``."""
    return bool(_of_split(pg, "is_pipeline_stage_at_split", True))


def is_inside_encoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if a stage runs the encoder, as ``is_inside_encoder()``.

    The stage is ``rank``. Default: this rank's. If the encoder has no separate stages, the first
    stage runs it.
    """
    found = _of_split(pg, "is_inside_encoder", None, rank=rank)
    if found is None:
        return pg.size("pp") == 1 or (pg.rank("pp") if rank is None else rank) == 0
    return bool(found)


def is_inside_decoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """True if the stage ``rank`` runs the decoder, as ``is_inside_decoder()``."""
    return bool(_of_split(pg, "is_inside_decoder", True, rank=rank))


def _of_split(
    pg: ProcessGroupCollection, getter: str, without: object, **arguments: object
) -> object:
    """Return the getter's answer if the pipeline is the globals', else ``without``."""
    if is_the_globals(pg, "pp") and can_be_asked(getter, arguments):
        return ask(pg, getter, **arguments)
    return without


@asks("get_inter_partial_data_parallel_group")
def inter_partial_data_group(
    pg: ProcessGroupCollection, *, check_initialized: bool = True
) -> ProcessGroup | None:
    """Return ``get_inter_partial_data_parallel_group()`` of 0.10 to 0.12: ``inter_dist_opt``.

    Those versions have a variable of another name for it. Otherwise as
    :func:`~megapg.megatron.getters.present_group`.
    """
    if reads_globals(pg) and is_held(_INTER_PARTIAL):
        return cast("ProcessGroup", read(pg, _INTER_PARTIAL))
    return present_group(pg, "inter_dist_opt", check_initialized=check_initialized)
