"""Collections from and to Megatron-core's ``HyperCommGrid``. No group is made for either.

Megatron-Bridge and Megatron-core's inference describe a job as two grids, one of the dense layers
and one of the experts. Each grid makes groups on request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch.distributed as dist

from megapg.collection import Lease, ProcessGroupCollection
from megapg.collection.membership import ProcessGroup, membership
from megapg.errors import LayoutError
from megapg.layout import DEFAULT_ORDER, Field, ParallelLayout, full_order
from megapg.megatron.core import core_version

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup as TorchGroup

# field -> the dimensions over which a grid makes it
_DENSE: Mapping[Field, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("dp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
_EXPERT: Mapping[Field, tuple[str, ...]] = {
    "ep": ("ep",),
    "expt_tp": ("tp",),
    "expt_dp": ("dp",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "intra_dist_opt": ("tp", "ep", "dp", "pp"),
}


class Grid(Protocol):
    """The part of a ``HyperCommGrid`` that is used here."""

    shape: list[int]
    dim_names: list[str]
    rank_offset: int

    def get_pg(self, dims: str | list[str]) -> TorchGroup:
        """Return the group of this rank over some dimensions; KeyError if none was made."""
        ...


def from_grid(dense: Grid, expert: Grid | None = None) -> ProcessGroupCollection:
    """Return a collection of the groups that grids have made: borrowed, never closed by megapg.

    Args:
        dense: has dimensions among ``tp``, ``cp``, ``dp`` and ``pp``.
        expert: of the experts, over the same ranks, with dimensions among ``tp``, ``ep``, ``dp``
            and ``pp``.

    Returns:
        A collection with the layout that both imply. A field is absent if ``create_pg`` was not
            called for it. A dimension that a grid lacks has the size 1.

    Raises:
        LayoutError: a dimension of another name is larger than 1, or the grids fit no layout
            together.
        ForeignGroupError: a group has ended.
    """
    layout = _implied(dense, expert)
    groups: dict[str, ProcessGroup] = {}
    for grid, fields in ((dense, _DENSE), (expert, _EXPERT)):
        if grid is not None:
            groups |= _made(grid, fields)
    members = {field: membership(cast("Field", field), group) for field, group in groups.items()}
    for field, each in members.items():
        expected = layout.members(cast("Field", field), dist.get_rank())
        if each.ranks != expected:
            raise LayoutError(
                f"from_grid(): {field} has the ranks {list(each.ranks)} here, and in the layout of "
                f"both grids, with order={layout.order!r}, {list(expected)}."
            )
    return ProcessGroupCollection(groups, members, Lease(owner="groups of from_grid()"), layout)


def to_grid(pg: ProcessGroupCollection | ParallelLayout) -> tuple[Grid, Grid]:
    """Return the two grids of a session, dense and expert, that hold its groups.

    Their ``create_pg`` raises for groups that exist already. Their ``destroy`` would end groups of
    the session: use :meth:`megapg.Session.close` instead.

    Args:
        pg: the session's groups; or its layout, on ranks outside. The grids of a layout have no
            groups.

    Raises:
        LayoutError: the groups have no layout, or its ranks are not consecutive: a grid has an
            offset and no list of ranks.
        StaleGroupError: the session has ended.
    """
    if isinstance(pg, ParallelLayout):
        layout: ParallelLayout | None = pg
    else:
        layout = pg.require(owner="to_grid()").layout
    if layout is None or not isinstance(layout.ranks, range) or layout.ranks.step != 1:
        ranks = "no layout" if layout is None else f"the ranks {list(layout.ranks)}"
        raise LayoutError(
            f"to_grid(): these groups have {ranks}; a grid is over ranks that follow each other, "
            "of a session."
        )
    if layout.optimizer_instances > 1 or layout.gtp_remat * layout.expt_gtp_remat > 1:
        raise LayoutError(
            "to_grid(): grids have no axis for optimizer_instances, gtp_remat and expt_gtp_remat."
        )
    order = [*layout.order.split("-")]
    order += [axis for axis in DEFAULT_ORDER.split("-") if axis not in order]
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    of_experts = {"tp": layout.expt_tp, "ep": layout.ep, "dp": layout.expt_dp, "pp": layout.pp}
    return (
        _grid(pg, layout.ranks[0], [axis for axis in order if axis != "ep"], sizes, _DENSE),
        _grid(pg, layout.ranks[0], [axis for axis in order if axis != "cp"], of_experts, _EXPERT),
    )


def _grid(
    pg: ProcessGroupCollection | ParallelLayout,
    first: int,
    names: list[str],
    sizes: Mapping[str, int],
    fields: Mapping[Field, tuple[str, ...]],
) -> Grid:
    core_version()
    from megatron.core.hyper_comm_grid import HyperCommGrid

    made: Any = HyperCommGrid([sizes[name] for name in names], names, rank_offset=first)
    held = vars(pg) if isinstance(pg, ProcessGroupCollection) else {}
    for field, dims in fields.items():
        group = held.get(field)
        if isinstance(group, ProcessGroup):
            made._pgs["-".join(name for name in reversed(names) if name in dims)] = group
    return cast("Grid", made)


def _made(
    grid: Grid, fields: Mapping[Field, tuple[str, ...]]
) -> Iterator[tuple[str, ProcessGroup]]:
    for field, dims in fields.items():
        there = [name for name in grid.dim_names if name in dims]
        try:
            group = grid.get_pg(there) if there else None
        except KeyError:
            continue
        if isinstance(group, ProcessGroup):
            yield field, group


def _implied(dense: Grid, expert: Grid | None) -> ParallelLayout:
    size = math.prod(dense.shape)
    sizes = _sizes(dense, ("tp", "cp", "dp", "pp"), "dense")
    order = [name for name in dense.dim_names if name in sizes]
    others = {"tp": sizes.get("tp", 1)}
    if expert is not None:
        others = _sizes(expert, ("tp", "ep", "dp", "pp"), "expert")
        if (math.prod(expert.shape), expert.rank_offset) != (size, dense.rank_offset):
            raise LayoutError(
                f"from_grid(): the expert grid is over {math.prod(expert.shape)} ranks from rank "
                f"{expert.rank_offset}, the dense one over {size} from {dense.rank_offset}; both "
                "describe the same ranks."
            )
        named = [name for name in expert.dim_names if name in others]
        if "ep" in named:
            behind = [name for name in named[named.index("ep") + 1 :] if name in order]
            order.insert(order.index(behind[0]) if behind else len(order), "ep")
    return ParallelLayout(
        world_size=size,
        tp=sizes.get("tp", 1),
        cp=sizes.get("cp", 1),
        pp=sizes.get("pp", 1),
        ep=others.get("ep", 1),
        expt_tp=others.get("tp", 1),
        order=full_order(order),
        ranks=range(dense.rank_offset, dense.rank_offset + size),
    )


def _sizes(grid: Grid, axes: Sequence[str], which: str) -> dict[str, int]:
    found = dict(zip(grid.dim_names, map(int, grid.shape), strict=True))
    unknown = [f"{name}={size}" for name, size in found.items() if name not in axes and size > 1]
    if unknown:
        raise LayoutError(
            f"from_grid(): the {which} grid has {', '.join(unknown)}; its dimensions are "
            f"{', '.join(axes)}."
        )
    return {name: size for name, size in found.items() if name in axes}
