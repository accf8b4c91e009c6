"""What ``parallel_state`` answers and no field holds, as functions of a collection.

Each takes a collection, explicit or :class:`~megapg.megatron.GlobalGroups`, and gives what the
getter named in its docstring gives, in the installed version of Megatron-core. A group, a rank or a
size that a field does hold needs none of them: ``pg.tp``, ``pg.rank("dp_cp")``, ``pg.ranks("cp")``.

A ``MissingGroupError`` about the globals is an ``AssertionError`` as well, as from their getters.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast, overload

import torch

from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.errors import (
    LayoutError,
    MissingGlobalGroupError,
    UnknownStageError,
    UnsupportedOptionError,
)
from megapg.megatron.adapted import as_collection
from megapg.megatron.core import MegatronCollection, globals_of_core, installed_version
from megapg.megatron.tables import (
    MEMORY_BUFFER,
    TAKES_VP_STAGE,
    VIRTUAL_PIPELINE_RANK,
    VIRTUAL_PIPELINE_SIZE,
)
from megapg.megatron.view import GlobalGroups, several_pipelines, value_in_globals

_PIPELINES = "_PIPELINE_MODEL_PARALLEL_GROUP"  # a list up to 0.13, of a rank in several
_EMBEDDING_RANKS = "_EMBEDDING_GLOBAL_RANKS"  # in the order in which they were chosen

# Of encoder and decoder on stages of their own, which Megatron-core had up to 0.13.
_SPLIT_RANK = "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK"
_DECODER_START = "_PIPELINE_MODEL_PARALLEL_DECODER_START"

_INTER_PARTIAL = "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"  # up to 0.12

# The first versions in which, where nothing is split, the first stage alone is the encoder's; in
# which no hierarchical groups are None and not an empty list; and whose get_all_ranks() counts
# rematerialisation in.
_ENCODER_IS_FIRST_STAGE = (0, 10)
_HIERARCHY_IS_NONE = (0, 13)
_COUNTS_REMAT = (0, 19)


class MemoryBuffer(Protocol):
    """Megatron-core's ``GlobalMemoryBuffer``: tensors by name, allocated once and reused."""

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> torch.Tensor:
        """A tensor of that shape, on memory that the next caller with the same name gets too."""


# -- is there a collection? ------------------------------------------------------------------------


def is_initialized(pg_collection: ProcessGroupCollection | MegatronCollection | None) -> bool:
    """For ``is_initialized()``: whether there are groups to use. A collection of live groups
    answers True, whatever its fields: a model's may lack the data parallel group.

    Asked of what a function was passed, before :func:`~megapg.megatron.resolve`: None asks the
    globals whether they have a data parallel group.
    """
    return _has(pg_collection, "dp")


def model_parallel_is_initialized(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
) -> bool:
    """For ``model_parallel_is_initialized()``: whether there are groups to use, of a collection as
    :func:`is_initialized`.

    Asked of what a function was passed, before :func:`~megapg.megatron.resolve`: None asks the
    globals whether they have tensor, pipeline and data parallel groups.
    """
    return _has(pg_collection, "tp", "pp", "dp")


def _has(passed: ProcessGroupCollection | MegatronCollection | None, *fields: str) -> bool:
    pg = as_collection(passed)  # it may be Megatron-core's own, as resolve() takes it
    view = pg if isinstance(pg, GlobalGroups) else GlobalGroups()
    if pg is not None and pg is not view and any(group is not None for group in vars(pg).values()):
        return pg.holds(())
    # One that holds no group was made before there were any: there may be now.
    if _in_several_pipelines(view):
        fields = tuple(field for field in fields if field != "pp")
    return all(hasattr(view, field) for field in fields)


# -- pipeline --------------------------------------------------------------------------------------


def virtual_pipeline_size(pg: ProcessGroupCollection) -> int | None:
    """For ``get_virtual_pipeline_model_parallel_world_size()``: model chunks per rank, or None.

    Of a collection of borrowed groups the globals know where its pipeline is theirs.

    Raises:
        LayoutError: the collection is of other borrowed groups, which don't say.
    """
    if _is_the_globals_pipeline(pg):
        return _number(pg, VIRTUAL_PIPELINE_SIZE)
    if pg.layout is None:
        raise LayoutError(
            f"the groups of {pg.lease.owner} don't say whether the pipeline is virtual. Pass "
            "vp_size= (the config's virtual_pipeline_model_parallel_size), or ignore_virtual=True "
            "where that is None; a session's groups know."
        )
    return pg.layout.vpp


def is_pipeline_first_stage(
    pg: ProcessGroupCollection,
    *,
    ignore_virtual: bool | None = None,
    vp_stage: int | None = None,
    vp_size: int | None = None,
) -> bool:
    """For ``is_pipeline_first_stage()``: whether this rank holds the first stage.

    Args:
        pg: the collection.
        ignore_virtual: ask about the rank and not about one of its model chunks; as the installed
            Megatron-core does unless given: True from 0.13 on, False before.
        vp_stage: the model chunk that is meant, with ``ignore_virtual=False``. Megatron-core before
            0.13 has a current one, which serves unless given: whatever the groups, its schedule
            keeps it in the globals.
        vp_size: model chunks per rank; the layout's unless given.

    Raises:
        UnknownStageError: ``vp_stage`` is needed and not given.
        LayoutError: ``vp_size`` is needed and not known.
    """
    chunk = _chunk(pg, ignore_virtual, vp_stage, vp_size)
    return (chunk is None or chunk[0] == 0) and pg.rank("pp") == 0


def is_pipeline_last_stage(
    pg: ProcessGroupCollection,
    *,
    ignore_virtual: bool | None = None,
    vp_stage: int | None = None,
    vp_size: int | None = None,
) -> bool:
    """For ``is_pipeline_last_stage()``: whether this rank holds the last stage.

    Args:
        pg: the collection.
        ignore_virtual: see :func:`is_pipeline_first_stage`.
        vp_stage: see there.
        vp_size: see there.

    Raises:
        UnknownStageError: ``vp_stage`` is needed and not given.
        LayoutError: ``vp_size`` is needed and not known.
    """
    chunk = _chunk(pg, ignore_virtual, vp_stage, vp_size)
    if chunk is not None and chunk[0] != chunk[1] - 1:
        return False
    return pg.rank("pp") == pg.size("pp") - 1


def _chunk(
    pg: ProcessGroupCollection,
    ignore_virtual: bool | None,
    vp_stage: int | None,
    vp_size: int | None,
) -> tuple[int, int] | None:
    """The model chunk that is asked about and how many there are; None where chunks don't count."""
    if _ignores_virtual(ignore_virtual):
        return None
    size = virtual_pipeline_size(pg) if vp_size is None else vp_size
    if size is None:
        return None
    if vp_stage is None and installed_version() < TAKES_VP_STAGE:
        vp_stage = _number(pg, VIRTUAL_PIPELINE_RANK)
        if vp_stage is not None and vp_stage >= size and not _is_the_globals_pipeline(pg):
            vp_stage = None  # of another schedule
    if vp_stage is None:
        raise UnknownStageError(
            f"this pipeline has {size} model chunks on a rank: pass the one that is meant as "
            "vp_stage=, or ignore_virtual=True."
        )
    return vp_stage, size


def _in_several_pipelines(pg: ProcessGroupCollection) -> bool:
    return isinstance(pg, GlobalGroups) and several_pipelines() is not None


def _ignores_virtual(given: bool | None) -> bool:
    return installed_version() >= TAKES_VP_STAGE if given is None else given


def pipeline_first_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_first_rank()``: global rank of the first stage."""
    return pg.ranks("pp")[0]


def pipeline_last_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_last_rank()``: global rank of the last stage."""
    return pg.ranks("pp")[pg.size("pp") - 1]


def pipeline_next_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_next_rank()``: global rank of the next stage.

    After the last comes the first, unlike in Megatron-core's ``get_pp_next_rank(pg.pp)``.
    """
    return pg.ranks("pp")[(pg.rank("pp") + 1) % pg.size("pp")]


def pipeline_prev_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_pipeline_model_parallel_prev_rank()``: global rank of the stage before.

    Before the first comes the last, unlike in Megatron-core's ``get_pp_prev_rank(pg.pp)``.
    """
    return pg.ranks("pp")[(pg.rank("pp") - 1) % pg.size("pp")]


def pipeline_or_pipelines(pg: ProcessGroupCollection) -> ProcessGroup | list[ProcessGroup]:
    """For ``get_pipeline_model_parallel_group()`` of code that can do with a list: the group; in
    the globals of a rank in several pipelines, which no field can hold, all of them.

    Up to Megatron-core 0.13 there are such ranks, where an encoder has fewer tensor parallel ranks
    than its decoder. ``pg.pp`` raises there.
    """
    several = _pipelines(pg)
    return pg.pp if several is None else several


def pipeline_next_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """For ``get_pipeline_model_parallel_next_rank()`` of such code: a rank for each pipeline."""
    return pipeline_next_rank(pg) if (ranks := _in_each_pipeline(pg, 1)) is None else ranks


def pipeline_prev_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """For ``get_pipeline_model_parallel_prev_rank()`` of such code: a rank for each pipeline."""
    return pipeline_prev_rank(pg) if (ranks := _in_each_pipeline(pg, -1)) is None else ranks


def pipeline_last_rank_or_ranks(pg: ProcessGroupCollection) -> int | list[int]:
    """For ``get_pipeline_model_parallel_last_rank()`` of such code: a rank for each pipeline."""
    ranks = _in_each_pipeline(pg, pg.size("pp") - 1 - pg.rank("pp"))
    return pipeline_last_rank(pg) if ranks is None else ranks


def _pipelines(pg: ProcessGroupCollection) -> list[ProcessGroup] | None:
    """Of a rank in several pipelines those."""
    if not _in_several_pipelines(pg):
        return None
    return cast(list[ProcessGroup], _view(pg).read(_PIPELINES))


def _in_each_pipeline(pg: ProcessGroupCollection, stages: int) -> list[int] | None:
    """Of a rank in several pipelines the rank that many stages on in each."""
    several = _pipelines(pg)
    if several is None:
        return None
    at = (pg.rank("pp") + stages) % pg.size("pp")
    return [torch.distributed.get_process_group_ranks(each)[at] for each in several]


# -- encoder and decoder ---------------------------------------------------------------------------


def pipeline_split_rank(pg: ProcessGroupCollection) -> int | None:
    """For ``get_pipeline_model_parallel_split_rank()``: the first stage of the decoder, or None.

    Of a collection of borrowed groups the globals know where its pipeline is theirs. No other has
    such a split, nor have those of Megatron-core from 0.14 on. The same holds for what follows
    here.
    """
    return _number(pg, _SPLIT_RANK) if _is_the_globals_pipeline(pg) else None


def pipeline_decoder_start(pg: ProcessGroupCollection) -> int | None:
    """For ``get_pipeline_model_parallel_decoder_start()``: the first stage of the decoder, where
    the encoder has stages of its own, or None.
    """
    return _number(pg, _DECODER_START) if _is_the_globals_pipeline(pg) else None


def is_pipeline_stage_before_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_pipeline_stage_before_split()``: whether a stage runs the encoder.

    Args:
        pg: the collection.
        rank: the stage; this rank's unless given.
    """
    split, stage = pipeline_split_rank(pg), _one_of_several(pg, rank)
    return split is None or stage is None or stage < split


def is_pipeline_stage_after_split(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_pipeline_stage_after_split()``: whether a stage runs the decoder.

    Args:
        pg: the collection.
        rank: the stage; this rank's unless given.
    """
    split, stage = pipeline_split_rank(pg), _one_of_several(pg, rank)
    return split is None or stage is None or stage >= split


def is_pipeline_stage_at_split(pg: ProcessGroupCollection) -> bool:
    """For ``is_pipeline_stage_at_split()``: whether this stage is the encoder's last."""
    rank = pg.rank("pp")
    return is_pipeline_stage_before_split(pg, rank) and is_pipeline_stage_after_split(pg, rank + 1)


def is_inside_encoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_inside_encoder()``: whether a stage runs the encoder. Where the encoder has no
    stages of its own, that is the first.

    Args:
        pg: the collection.
        rank: the stage; this rank's unless given.
    """
    start, stage = pipeline_decoder_start(pg), _one_of_several(pg, rank)
    if stage is None:
        return True
    if start is None:
        return stage == 0 or installed_version() < _ENCODER_IS_FIRST_STAGE
    return stage < start


def is_inside_decoder(pg: ProcessGroupCollection, rank: int | None = None) -> bool:
    """For ``is_inside_decoder()``: whether a stage runs the decoder.

    Args:
        pg: the collection.
        rank: the stage; this rank's unless given.
    """
    start, stage = pipeline_decoder_start(pg), _one_of_several(pg, rank)
    return start is None or stage is None or stage >= start


def _one_of_several(pg: ProcessGroupCollection, given: int | None) -> int | None:
    """The stage that is asked about; None in a pipeline of one, which does everything."""
    if pg.size("pp") == 1:
        return None
    return pg.rank("pp") if given is None else given


# -- embeddings ------------------------------------------------------------------------------------


def is_rank_in_embedding_group(
    pg: ProcessGroupCollection,
    *,
    ignore_virtual: bool | None = None,
    vp_stage: int | None = None,
    vp_size: int | None = None,
) -> bool:
    """For ``is_rank_in_embedding_group()``: whether this rank holds the word embeddings.

    Args:
        pg: the collection.
        ignore_virtual: see :func:`is_pipeline_first_stage`. If False, the question is about one
            model chunk: on the first rank of the group it must be the first stage, on the last
            one the last.
        vp_stage: see there.
        vp_size: see there.

    Raises:
        UnknownStageError: ``vp_stage`` is needed and not given.
        LayoutError: ``vp_size`` is needed and not known.
    """
    if pg.embd is None:
        return False
    if _ignores_virtual(ignore_virtual):
        return True
    me, chosen = pg.ranks("embd")[pg.rank("embd")], embedding_ranks(pg)
    if me == chosen[0]:
        return is_pipeline_first_stage(pg, ignore_virtual=False, vp_stage=vp_stage, vp_size=vp_size)
    if me == chosen[-1]:
        return is_pipeline_last_stage(pg, ignore_virtual=False, vp_stage=vp_stage, vp_size=vp_size)
    return True


def is_rank_in_position_embedding_group(pg: ProcessGroupCollection) -> bool:
    """For ``is_rank_in_position_embedding_group()``: whether this rank holds those."""
    return pg.pos_embd is not None


def embedding_ranks(pg: ProcessGroupCollection) -> list[int]:
    """For ``_EMBEDDING_GLOBAL_RANKS``: global ranks of the group, in the order of their choice."""
    chosen = _embedding_ranks(pg)
    return list(pg.ranks("embd") if chosen is None else chosen)  # it knows what to say


def _embedding_ranks(pg: ProcessGroupCollection) -> Sequence[int] | None:
    if isinstance(pg, GlobalGroups):
        return cast(Sequence[int] | None, pg.read(_EMBEDDING_RANKS))
    if pg.layout is None:
        return pg.ranks("embd")
    return pg.layout.embedding_ranks(list(pg.ranks("pp")))


# -- groups that may not be there ------------------------------------------------------------------


@overload
def present_group(pg: ProcessGroupCollection, field: str) -> ProcessGroup: ...


@overload
def present_group(
    pg: ProcessGroupCollection, field: str, *, check_initialized: bool
) -> ProcessGroup | None: ...


def present_group(
    pg: ProcessGroupCollection, field: str, *, check_initialized: bool = True
) -> ProcessGroup | None:
    """For ``get_embedding_group()`` and whatever else fails where there is no group: never None,
    which torch would take for WORLD.

    Args:
        pg: the collection.
        field: ``embd``, ``pos_embd``, ``inter_dist_opt`` or any other of one group.
        check_initialized: if False, the answer is None where there is no group.

    Raises:
        MissingGroupError: the field is None here, or the collection lacks it; or it is the pipeline
            of a rank that is in several.
    """
    checked = check_initialized or (field == "pp" and _in_several_pipelines(pg))
    found: ProcessGroup | None = getattr(pg, field, *(() if checked else (None,)))
    if found is None and checked:
        pg.ranks(field)  # knows what to say
    return found


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
    which those versions have a variable of another name.

    Args:
        pg: the collection.
        check_initialized: if False, the answer is None where there is no group.

    Raises:
        MissingGroupError: there is one optimizer instance only, or the collection lacks the field.
    """
    if isinstance(pg, GlobalGroups) and globals_of_core().get(_INTER_PARTIAL):
        return cast(ProcessGroup, pg.read(_INTER_PARTIAL))
    return present_group(pg, "inter_dist_opt", check_initialized=check_initialized)


@overload
def hierarchical_groups(pg: ProcessGroupCollection) -> list[ProcessGroup]: ...


@overload
def hierarchical_groups(
    pg: ProcessGroupCollection, *, check_initialized: bool
) -> list[ProcessGroup] | None: ...


def hierarchical_groups(
    pg: ProcessGroupCollection, *, check_initialized: bool = True
) -> list[ProcessGroup] | None:
    """For ``get_hierarchical_context_parallel_groups()``: the groups of the levels, a list.

    Args:
        pg: the collection.
        check_initialized: if False, the answer is None where there are none. Before 0.13 it is an
            empty list, and nothing is checked.

    Raises:
        MissingGroupError: there are none, or the collection lacks ``hcp``.
    """
    found: Sequence[ProcessGroup] | None = getattr(
        pg, "hcp", *(() if check_initialized else (None,))
    )
    if found is not None:
        return list(found)
    if installed_version() < _HIERARCHY_IS_NONE:
        return []
    if check_initialized:
        pg.ranks("hcp")  # knows what to say
    return None


# -- source ranks ----------------------------------------------------------------------------------


def tensor_src_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_tensor_model_parallel_src_rank()``: global rank of the group's first."""
    return pg.ranks("tp")[0]


def model_src_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_model_parallel_src_rank()``: global rank of the group's first."""
    return pg.ranks("mp")[0]


def data_src_rank(pg: ProcessGroupCollection, *, with_context_parallel: bool = False) -> int:
    """For ``get_data_parallel_src_rank()``: global rank of the group's first."""
    return pg.ranks("dp_cp" if with_context_parallel else "dp")[0]


def expert_src_rank(pg: ProcessGroupCollection) -> int:
    """For ``get_expert_model_parallel_src_rank()``: global rank of the group's first."""
    return pg.ranks("ep")[0]


# -- groups that flags choose ----------------------------------------------------------------------


def data_group(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
) -> ProcessGroup:
    """For ``get_data_parallel_group()`` with flags that are known at run time only.

    Args:
        pg: the collection.
        with_context_parallel: ``dp_cp`` instead of ``dp``.
        partial_data_parallel: the part of it in this rank's optimizer instance, ``intra_dp_cp``.

    Raises:
        MissingGroupError: the collection lacks the field.
        UnsupportedOptionError: the part without context parallelism, which has no group.
    """
    return _group(pg, _data_field(pg, with_context_parallel, partial_data_parallel))


def data_rank(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
) -> int:
    """For ``get_data_parallel_rank()`` with such flags; see :func:`data_group`."""
    return pg.rank(_data_field(pg, with_context_parallel, partial_data_parallel))


def data_size(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
) -> int:
    """For ``get_data_parallel_world_size()`` with such flags; see :func:`data_group`."""
    return pg.size(_data_field(pg, with_context_parallel, partial_data_parallel))


def expert_data_group(
    pg: ProcessGroupCollection, *, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """For ``get_expert_data_parallel_group()``: ``expt_dp``, or the part of it in this rank's
    optimizer instance, ``intra_expt_dp``. Ranks and sizes: ``pg.rank("intra_expt_dp")``.

    Raises:
        MissingGroupError: the collection lacks the field.
    """
    _refuse_remat(pg, "expt_gtp_remat")
    return _group(pg, "intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def tensor_data_group(
    pg: ProcessGroupCollection, *, with_context_parallel: bool = False
) -> ProcessGroup:
    """For ``get_tensor_and_data_parallel_group()``: ``tp_dp_cp``, or ``tp_dp``, which a session
    makes and Megatron-core's own collection has no field for.

    Raises:
        MissingGroupError: the collection lacks the field.
    """
    return _group(pg, "tp_dp_cp" if with_context_parallel else "tp_dp")


def amax_reduction_group(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    tp_only_amax_red: bool = False,
) -> ProcessGroup:
    """For ``get_amax_reduction_group()``: over which FP8 scaling factors are agreed.

    Args:
        pg: the collection.
        with_context_parallel: include context parallelism.
        tp_only_amax_red: leave data parallelism out.

    Raises:
        MissingGroupError: the collection lacks the field.
    """
    if not tp_only_amax_red:
        return tensor_data_group(pg, with_context_parallel=with_context_parallel)
    return _group(pg, "tp_cp" if with_context_parallel else "tp")


def has_separate_all_gather_group(pg: ProcessGroupCollection) -> bool:
    """For ``has_separate_all_gather_group()``: whether ``dp_cp_ag`` is a group of its own."""
    return getattr(pg, "dp_cp_ag", None) is not None


def gloo_group(pg: ProcessGroupCollection, field: str) -> ProcessGroup:
    """For ``get_data_parallel_group_gloo()`` and ``get_expert_data_parallel_group_gloo()``.

    Args:
        pg: the collection. Of borrowed groups it is the globals' companion, where the group is
            theirs.
        field: whose gloo companion: ``dp``, ``dp_cp``, ``intra_dp_cp``, ``expt_dp`` or
            ``intra_expt_dp``.

    Raises:
        MissingGroupError: the session was not asked for it: ``session(gloo=("dp_cp",))``. It is
            never made here, for only one rank might be asking.
    """
    name = f"gloo.{field}"
    borrowed = not isinstance(pg, GlobalGroups) and pg.layout is None
    if borrowed and name not in pg.extras and _is_of_globals(pg, field):
        pg = GlobalGroups()
    return _extra(pg, name)


def hybrid_group(pg: ProcessGroupCollection, size: int) -> ProcessGroup:
    """For ``get_hybrid_data_context_parallel_groups(group_size=size)``.

    Args:
        pg: the collection.
        size: a power of two up to the size of ``dp_cp``, which is the largest group.

    Raises:
        MissingGroupError: no group of that size, or the session was not asked for any:
            ``session(hybrid_cp=True)``.
        UnsupportedOptionError: weights are rematerialised.
    """
    _refuse_remat(pg, "gtp_remat")
    return _group(pg, "dp_cp") if size == pg.size("dp_cp") else _extra(pg, f"hybrid.{size}")


# -- all of them -----------------------------------------------------------------------------------


def all_ranks(pg: ProcessGroupCollection) -> str:
    """For ``get_all_ranks()``: this rank's place on the axes, for names of files: ``1_0_0_2_0``.

    From 0.19 on there are six numbers: the second is for weight rematerialisation, of which megapg
    knows only that it is off.

    Raises:
        MissingGroupError: the collection lacks ``tp``, ``dp``, ``cp``, ``pp`` or ``ep``.
        UnsupportedOptionError: weights are rematerialised.
    """
    _refuse_remat(pg, "gtp_remat")
    ranks = [pg.rank(field) for field in ("tp", "dp", "cp", "pp", "ep")]
    if installed_version() >= _COUNTS_REMAT:
        ranks.insert(1, 0)
    return "_".join(map(str, ranks))


# -- memory ----------------------------------------------------------------------------------------


def memory_buffer(pg: ProcessGroupCollection) -> MemoryBuffer:
    """For ``get_global_memory_buffer()``: scratch memory that calls of the same name share.

    There is one for each owner of groups, made when it is first asked for: two models on two
    sessions never meet in one buffer. :class:`~megapg.megatron.GlobalGroups` has the global one,
    and so have borrowed groups that are the globals'.

    Raises:
        MissingGlobalGroupError: the globals have none.
        StaleGroupError: the session behind ``pg`` has ended.
    """
    if shares_globals_buffer(pg):
        buffer = _view(pg).read(MEMORY_BUFFER)
        if buffer is None:
            raise MissingGlobalGroupError(
                "the globals have no memory buffer, and get_global_memory_buffer() would fail too. "
                "Call initialize_model_parallel() before, or pass session.groups."
            )
        return cast(MemoryBuffer, buffer)
    pg.lease.check("memory_buffer()")
    return owners_buffer(pg)


def shares_globals_buffer(pg: ProcessGroupCollection) -> bool:
    """Whether :func:`memory_buffer` gives the global one. To find out is no read of it."""
    return isinstance(pg, GlobalGroups) or (pg.layout is None and _is_of_globals(pg, "tp"))


def owners_buffer(pg: ProcessGroupCollection) -> MemoryBuffer:
    """The one that goes with the owner of these groups, made when it is first asked for."""
    buffer = pg.lease.scratch.get(MEMORY_BUFFER)
    if buffer is None:
        made = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer()
        buffer = pg.lease.scratch.setdefault(MEMORY_BUFFER, made)  # one, whoever came first
    return cast(MemoryBuffer, buffer)


# -- common ----------------------------------------------------------------------------------------


def _is_of_globals(pg: ProcessGroupCollection, field: str) -> bool:
    """Whether a group is the very one that the globals have; to find out is no read of them."""
    return getattr(pg, field, pg) is value_in_globals(field)


def _is_the_globals_pipeline(pg: ProcessGroupCollection) -> bool:
    """Whether the globals know of its pipeline what no group tells."""
    return isinstance(pg, GlobalGroups) or (pg.layout is None and _is_of_globals(pg, "pp"))


def _data_field(pg: ProcessGroupCollection, with_context_parallel: bool, partial: bool) -> str:
    _refuse_remat(pg, "gtp_remat")
    if partial and not with_context_parallel:
        raise UnsupportedOptionError(
            "partial_data_parallel: an optimizer instance's part of data parallelism includes "
            "context parallelism; pass with_context_parallel=True as well."
        )
    return "intra_dp_cp" if partial else "dp_cp" if with_context_parallel else "dp"


def _refuse_remat(pg: ProcessGroupCollection, field: str) -> None:
    """With weight rematerialisation on, 0.19's data parallel getters mean wider groups than dp."""
    # To find out is no read of the globals.
    view = isinstance(pg, GlobalGroups)
    group = value_in_globals(field) if view else getattr(pg, field, None)
    if isinstance(group, ProcessGroup) and group.size() > 1:
        raise UnsupportedOptionError(
            f"{field} has {group.size()} ranks: megapg does not support generalised tensor "
            "parallelism, under which there are two data parallel groups to choose from. Take the "
            "field that you mean, such as pg.dp or pg.dp_cp_gtp_remat."
        )


def _group(pg: ProcessGroupCollection, field: str) -> ProcessGroup:
    found: ProcessGroup = getattr(pg, field)
    return found


def _extra(pg: ProcessGroupCollection, name: str) -> ProcessGroup:
    pg.ranks(name)  # knows what to say where there is none
    return pg.extras[name]


def _number(pg: ProcessGroupCollection, name: str) -> int | None:
    return cast(int | None, _view(pg).read(name))


def _view(pg: ProcessGroupCollection) -> GlobalGroups:
    """The globals, as a view of them or as borrowed groups that are theirs."""
    return pg if isinstance(pg, GlobalGroups) else GlobalGroups()
