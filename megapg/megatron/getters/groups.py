"""Groups that flags choose or that may not exist, with their ranks and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, overload

from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.errors import MissingGlobalGroupError, UnsupportedOptionError
from megapg.layout import Field, GroupName
from megapg.megatron.getters.asking import (
    ask,
    can_be_asked,
    extra_group,
    present_group,
    reads_globals,
    refuse_remat,
    since_013,
    why_missing,
)
from megapg.megatron.getters.asks import asks

__all__ = [
    "MissingHybridGroupError",
    "all_ranks",
    "amax_reduction_group",
    "data_group",
    "data_modulo_expert_group",
    "data_rank",
    "data_size",
    "data_src_rank",
    "expert_data_group",
    "expert_data_rank",
    "expert_data_size",
    "expert_src_rank",
    "gloo_group",
    "has_separate_all_gather_group",
    "hierarchical_groups",
    "hybrid_group",
    "model_src_rank",
    "present_group",
    "remat_rank",
    "remat_size",
    "tensor_data_group",
    "tensor_src_rank",
]

_HYBRID = "get_hybrid_data_context_parallel_groups"
_REMAT_RANK = "get_gtp_weight_remat_rank"
_EXPERT_REMAT_RANK = "get_expert_gtp_weight_remat_rank"


class MissingHybridGroupError(MissingGlobalGroupError, KeyError):
    """The globals have no hybrid group of that size; their getter raises a ``KeyError``."""

    __str__ = Exception.__str__  # a KeyError's is the repr of its message


@overload
def hierarchical_groups(pg: ProcessGroupCollection) -> list[ProcessGroup]: ...


@overload
def hierarchical_groups(
    pg: ProcessGroupCollection, *, check_initialized: bool
) -> list[ProcessGroup] | None: ...


@asks("get_hierarchical_context_parallel_groups")
def hierarchical_groups(
    pg: ProcessGroupCollection, *, check_initialized: bool = True
) -> list[ProcessGroup] | None:
    """Return ``get_hierarchical_context_parallel_groups()``: the list of the levels' groups.

    Without ``check_initialized`` the result is None if there are none. Before 0.13 it is an empty
    list, and nothing is checked.

    Raises:
        MissingGroupError: there are none, or the collection lacks ``hcp``.
    """
    found: Sequence[ProcessGroup] | None = getattr(
        pg, "hcp", *(() if check_initialized else (None,))
    )
    if found is not None:
        return list(found)
    if not since_013():
        return []
    if check_initialized:
        pg.ranks("hcp")  # raises the right error
    return None


@asks("get_tensor_model_parallel_src_rank")
def tensor_src_rank(pg: ProcessGroupCollection) -> int:
    """Return ``get_tensor_model_parallel_src_rank()``: global rank of the group's first rank."""
    return pg.ranks("tp")[0]


@asks("get_model_parallel_src_rank")
def model_src_rank(pg: ProcessGroupCollection) -> int:
    """Return ``get_model_parallel_src_rank()``: global rank of the group's first rank."""
    return pg.ranks("mp")[0]


@asks("get_data_parallel_src_rank")
def data_src_rank(pg: ProcessGroupCollection, *, with_context_parallel: bool = False) -> int:
    """Return ``get_data_parallel_src_rank()``: global rank of the group's first rank."""
    return pg.ranks("dp_cp" if with_context_parallel else "dp")[0]


@asks("get_expert_model_parallel_src_rank")
def expert_src_rank(pg: ProcessGroupCollection) -> int:
    """Return ``get_expert_model_parallel_src_rank()``: global rank of the group's first rank."""
    return pg.ranks("ep")[0]


@asks("get_data_parallel_group", refused_with="gtp_remat")
def data_group(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
) -> ProcessGroup:
    """Return ``get_data_parallel_group()`` for flags that are known only at run time.

    This is ``dp``, or with context parallelism ``dp_cp``, or the part of that in this rank's
    optimizer instance, ``intra_dp_cp``.

    Raises:
        MissingGroupError: the collection lacks the field.
        UnsupportedOptionError: the part without context parallelism, which has no group.
    """
    return _group(pg, _data_field(with_context_parallel, partial_data_parallel))


@asks("get_data_parallel_rank", refused_with="gtp_remat")
def data_rank(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
) -> int:
    """Return ``get_data_parallel_rank()`` for such flags; see :func:`data_group`."""
    return pg.rank(_data_field(with_context_parallel, partial_data_parallel))


@asks("get_data_parallel_world_size", refused_with="gtp_remat")
def data_size(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
) -> int:
    """Return ``get_data_parallel_world_size()`` for such flags; see :func:`data_group`."""
    return pg.size(_data_field(with_context_parallel, partial_data_parallel))


@asks("get_expert_data_parallel_group", refused_with="expt_gtp_remat")
def expert_data_group(
    pg: ProcessGroupCollection, *, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """Return ``get_expert_data_parallel_group()`` for a flag that is known only at run time.

    This is ``expt_dp``, or the part of it in this rank's optimizer instance, ``intra_expt_dp``.

    Raises:
        MissingGroupError: the collection lacks the field.
    """
    return _group(pg, _expert_data_field(partial_expert_data_parallel))


@asks("get_expert_data_parallel_rank", refused_with="expt_gtp_remat")
def expert_data_rank(
    pg: ProcessGroupCollection, *, partial_expert_data_parallel: bool = False
) -> int:
    """Return ``get_expert_data_parallel_rank()`` for such a flag; see :func:`expert_data_group`."""
    return pg.rank(_expert_data_field(partial_expert_data_parallel))


@asks("get_expert_data_parallel_world_size", refused_with="expt_gtp_remat")
def expert_data_size(
    pg: ProcessGroupCollection, *, partial_expert_data_parallel: bool = False
) -> int:
    """Return ``get_expert_data_parallel_world_size()``; see :func:`expert_data_group`."""
    return pg.size(_expert_data_field(partial_expert_data_parallel))


@asks("get_data_modulo_expert_parallel_group")
def data_modulo_expert_group(
    pg: ProcessGroupCollection, *, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """Return ``get_data_modulo_expert_parallel_group()`` (to 0.16): :func:`expert_data_group`."""
    return expert_data_group(pg, partial_expert_data_parallel=partial_expert_data_parallel)


@asks("get_tensor_and_data_parallel_group")
def tensor_data_group(
    pg: ProcessGroupCollection, *, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return ``get_tensor_and_data_parallel_group()``: ``tp_dp_cp`` or ``tp_dp``.

    A session makes ``tp_dp``; Megatron-core's own collection has no field for it.

    Raises:
        MissingGroupError: the collection lacks the field.
    """
    return _group(pg, "tp_dp_cp" if with_context_parallel else "tp_dp")


@asks("get_amax_reduction_group")
def amax_reduction_group(
    pg: ProcessGroupCollection,
    *,
    with_context_parallel: bool = False,
    tp_only_amax_red: bool = False,
) -> ProcessGroup:
    """Return ``get_amax_reduction_group()``: the group that agrees on FP8 scaling factors.

    With ``tp_only_amax_red`` it has no data parallel ranks.

    Raises:
        MissingGroupError: the collection lacks the field.
    """
    if not tp_only_amax_red:
        return tensor_data_group(pg, with_context_parallel=with_context_parallel)
    return _group(pg, "tp_cp" if with_context_parallel else "tp")


@asks("has_separate_all_gather_group")
def has_separate_all_gather_group(pg: ProcessGroupCollection) -> bool:
    """True if ``dp_cp_ag`` is a separate group, as ``has_separate_all_gather_group()``."""
    return getattr(pg, "dp_cp_ag", None) is not None


def remat_rank(pg: ProcessGroupCollection, field: GroupName) -> int:
    """Return ``get_gtp_weight_remat_rank()`` or ``get_expert_gtp_weight_remat_rank()``.

    ``field`` is ``gtp_remat`` or ``expt_gtp_remat``. The result is 0 if weights are not
    rematerialised, and so there is no group.

    Raises:
        MissingGroupError: the collection lacks the field.
    """
    return pg.rank(field) if _counts_remat(pg, field) else 0


def remat_size(pg: ProcessGroupCollection, field: GroupName) -> int:
    """Return the number of ranks, likewise.

    For ``get_gtp_weight_remat_world_size()`` and ``get_expert_gtp_weight_remat_world_size()``.
    """
    return pg.size(field) if _counts_remat(pg, field) else 0


def _counts_remat(pg: ProcessGroupCollection, field: GroupName) -> bool:
    getter = _REMAT_RANK if field == "gtp_remat" else _EXPERT_REMAT_RANK
    return (reads_globals(pg) and can_be_asked(getter)) or getattr(pg, field) is not None


def gloo_group(pg: ProcessGroupCollection, field: GroupName) -> ProcessGroup:
    """Return ``get_data_parallel_group_gloo()`` or ``get_expert_data_parallel_group_gloo()``.

    Args:
        pg: the collection. For borrowed groups that are the globals', the result is the globals'
            companion.
        field: the field of the gloo companion: ``dp``, ``dp_cp``, ``intra_dp_cp``, ``expt_dp`` or
            ``intra_expt_dp``.

    Raises:
        MissingGroupError: the session was opened without it: ``session(gloo=("dp_cp",))``. It is
            never made here, because only one rank might call this.
    """
    return extra_group(pg, cast("GroupName", f"gloo.{field}"), of=field)


def hybrid_group(pg: ProcessGroupCollection, size: int) -> ProcessGroup:
    """Return ``get_hybrid_data_context_parallel_groups(group_size=size)``.

    Args:
        pg: the collection.
        size: a power of two up to the size of ``dp_cp``, which is the largest group.

    Raises:
        MissingGroupError: no group of that size, or the session was opened without any:
            ``session(hybrid_cp=True)``.
        UnsupportedOptionError: weights are rematerialised.
    """
    refuse_remat(pg, "gtp_remat")
    name = cast("GroupName", f"hybrid.{size}")
    if reads_globals(pg) and can_be_asked(_HYBRID, ["group_size"]):
        try:
            return cast("ProcessGroup", ask(pg, _HYBRID, group_size=size))
        except KeyError:
            raise MissingHybridGroupError(why_missing(pg, name)) from None
    return _group(pg, "dp_cp") if size == pg.size("dp_cp") else extra_group(pg, name)


@asks("get_all_ranks", refused_with="gtp_remat")
def all_ranks(pg: ProcessGroupCollection) -> str:
    """Return ``get_all_ranks()``: this rank's place on the axes, for file names: ``1_0_0_2_0``.

    From 0.19 on there are six numbers: the second is for weight rematerialisation, and always 0
    here.

    Raises:
        MissingGroupError: the collection lacks ``tp``, ``dp``, ``cp``, ``pp`` or ``ep``.
        UnsupportedOptionError: weights are rematerialised.
    """
    ranks = [pg.rank(field) for field in ("tp", "dp", "cp", "pp", "ep")]
    if can_be_asked(_REMAT_RANK):
        ranks.insert(1, 0)
    return "_".join(map(str, ranks))


def _data_field(with_context_parallel: bool, partial: bool) -> Field:
    if partial and not with_context_parallel:
        raise UnsupportedOptionError(
            "partial_data_parallel: an optimizer instance's part of data parallelism includes "
            "context parallelism; pass with_context_parallel=True as well."
        )
    return "intra_dp_cp" if partial else "dp_cp" if with_context_parallel else "dp"


def _expert_data_field(partial: bool) -> Field:
    return "intra_expt_dp" if partial else "expt_dp"


def _group(pg: ProcessGroupCollection, field: str) -> ProcessGroup:
    found: ProcessGroup = getattr(pg, field)
    return found
