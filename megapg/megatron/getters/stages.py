"""This rank's place in its pipeline, and its embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from megapg.collection import ProcessGroupCollection
from megapg.errors import LayoutError, UnknownStageError
from megapg.megatron.getters.asking import (
    ask,
    counts_chunks,
    is_the_globals,
    owner_of,
    read,
    reads_globals,
    since_013,
)
from megapg.megatron.getters.asks import asks

__all__ = [
    "embedding_ranks",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "is_rank_in_embedding_group",
    "is_rank_in_position_embedding_group",
    "pipeline_first_rank",
    "pipeline_last_rank",
    "pipeline_next_rank",
    "pipeline_prev_rank",
    "virtual_pipeline_size",
]

_EMBEDDING_RANKS = "_EMBEDDING_GLOBAL_RANKS"  # in the order of their choice
_CURRENT_CHUNK = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"
_CHUNKS = "get_virtual_pipeline_model_parallel_world_size"


def virtual_pipeline_size(pg: ProcessGroupCollection) -> int | None:
    """Return ``get_virtual_pipeline_model_parallel_world_size()``: chunks per rank, or None.

    For borrowed groups, the globals answer if the pipeline is theirs. A pipeline of one stage has
    one chunk.

    Raises:
        LayoutError: the collection is of other borrowed groups, for which the size is unknown.
    """
    if is_the_globals(pg, "pp"):
        return cast("int | None", ask(pg, _CHUNKS))
    if pg.layout is None and pg.size("pp") == 1:
        return None
    if pg.layout is None:
        raise LayoutError(
            f"the groups of {owner_of(pg)} don't say whether the pipeline is virtual. Pass "
            "vp_size= (the config's virtual_pipeline_model_parallel_size), or ignore_virtual=True "
            "where that is None."
        )
    return pg.layout.vpp


def _chunk(
    pg: ProcessGroupCollection,
    ignore_virtual: bool | None = None,
    vp_stage: int | None = None,
    vp_size: int | None = None,
) -> tuple[int, int] | None:
    """Return the model chunk in question and the number of chunks; None if chunks do not count."""
    if _ignores_virtual(pg, ignore_virtual):
        return None
    size = virtual_pipeline_size(pg) if vp_size is None else vp_size
    if size is None:
        return None
    if vp_stage is None and not since_013():
        vp_stage = cast("int | None", read(pg, _CURRENT_CHUNK))
        if vp_stage is not None and vp_stage >= size and not is_the_globals(pg, "pp"):
            vp_stage = None  # another schedule's
    if vp_stage is None:
        raise UnknownStageError(
            f"this pipeline has {size} model chunks on a rank: pass the one that is meant as "
            "vp_stage=, or ignore_virtual=True."
        )
    return vp_stage, size


def _ignores_virtual(pg: ProcessGroupCollection, given: bool | None) -> bool:
    return not counts_chunks(pg) if given is None else given


@asks("is_pipeline_first_stage", why=_chunk)
def is_pipeline_first_stage(
    pg: ProcessGroupCollection,
    *,
    ignore_virtual: bool | None = None,
    vp_stage: int | None = None,
    vp_size: int | None = None,
) -> bool:
    """True if this rank holds the first stage, as ``is_pipeline_first_stage()``.

    Args:
        pg: the collection.
        ignore_virtual: ask about the rank, not about one of its model chunks. Default: as the
            installed Megatron-core, True from 0.13 on, False before.
        vp_stage: the model chunk, with ``ignore_virtual=False``. Default before Megatron-core 0.13:
            the current one, which its schedule stores in the globals, whatever the groups.
        vp_size: model chunks per rank. Default: the layout's.

    Raises:
        UnknownStageError: ``vp_stage`` is needed and not given.
        LayoutError: ``vp_size`` is needed and not known.
    """
    chunk = _chunk(pg, ignore_virtual, vp_stage, vp_size)
    return (chunk is None or chunk[0] == 0) and pg.rank("pp") == 0


@asks("is_pipeline_last_stage", why=_chunk)
def is_pipeline_last_stage(
    pg: ProcessGroupCollection,
    *,
    ignore_virtual: bool | None = None,
    vp_stage: int | None = None,
    vp_size: int | None = None,
) -> bool:
    """True if this rank holds the last stage, as ``is_pipeline_last_stage()``.

    Arguments and errors are those of :func:`is_pipeline_first_stage`.
    """
    chunk = _chunk(pg, ignore_virtual, vp_stage, vp_size)
    if chunk is not None and chunk[0] != chunk[1] - 1:
        return False
    return pg.rank("pp") == pg.size("pp") - 1


@asks("get_pipeline_model_parallel_first_rank")
def pipeline_first_rank(pg: ProcessGroupCollection) -> int:
    """Return ``get_pipeline_model_parallel_first_rank()``: the global rank of the first stage."""
    return pg.ranks("pp")[0]


@asks("get_pipeline_model_parallel_last_rank")
def pipeline_last_rank(pg: ProcessGroupCollection) -> int:
    """Return ``get_pipeline_model_parallel_last_rank()``: the global rank of the last stage.

    Up to Megatron-core 0.13 a rank can be in several pipelines. The globals then answer with a list
    of ranks. The same holds for the two functions below.
    """
    return pg.ranks("pp")[-1]


@asks("get_pipeline_model_parallel_next_rank")
def pipeline_next_rank(pg: ProcessGroupCollection) -> int:
    """Return ``get_pipeline_model_parallel_next_rank()``: the global rank of the next stage.

    After the last stage comes the first, unlike in Megatron-core's ``get_pp_next_rank(pg.pp)``.
    """
    return pg.ranks("pp")[(pg.rank("pp") + 1) % pg.size("pp")]


@asks("get_pipeline_model_parallel_prev_rank")
def pipeline_prev_rank(pg: ProcessGroupCollection) -> int:
    """Return ``get_pipeline_model_parallel_prev_rank()``: the global rank of the previous stage.

    Before the first stage comes the last, unlike in Megatron-core's ``get_pp_prev_rank(pg.pp)``.
    """
    return pg.ranks("pp")[(pg.rank("pp") - 1) % pg.size("pp")]


@asks("is_rank_in_embedding_group", why=_chunk)
def is_rank_in_embedding_group(
    pg: ProcessGroupCollection,
    *,
    ignore_virtual: bool | None = None,
    vp_stage: int | None = None,
    vp_size: int | None = None,
) -> bool:
    """True if this rank holds the word embeddings, as ``is_rank_in_embedding_group()``.

    Arguments and errors are those of :func:`is_pipeline_first_stage`. If ``ignore_virtual`` is
    False, the question is about one model chunk: on the first rank of the group it must be the
    first stage, on the last rank the last stage.
    """
    if pg.embd is None:
        return False
    if _ignores_virtual(pg, ignore_virtual):
        return True
    me, chosen = pg.ranks("embd")[pg.rank("embd")], embedding_ranks(pg)
    if me == chosen[0]:
        return is_pipeline_first_stage(pg, ignore_virtual=False, vp_stage=vp_stage, vp_size=vp_size)
    if me == chosen[-1]:
        return is_pipeline_last_stage(pg, ignore_virtual=False, vp_stage=vp_stage, vp_size=vp_size)
    return True


@asks("is_rank_in_position_embedding_group")
def is_rank_in_position_embedding_group(pg: ProcessGroupCollection) -> bool:
    """True if this rank holds these, as ``is_rank_in_position_embedding_group()``."""
    return pg.pos_embd is not None


def embedding_ranks(pg: ProcessGroupCollection) -> list[int]:
    """Return ``_EMBEDDING_GLOBAL_RANKS``: the group's global ranks, in order of their choice."""
    if reads_globals(pg) and (chosen := read(pg, _EMBEDDING_RANKS)) is not None:
        return list(cast("Sequence[int]", chosen))
    if pg.layout is None:  # also for the globals, which raise the right error
        return list(pg.ranks("embd"))
    return list(pg.layout.embedding_ranks(list(pg.ranks("pp"))))
