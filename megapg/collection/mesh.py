"""Convert a collection to torch's DeviceMesh, and a mesh to a collection, without new groups.

``pg.mesh("dp_cp", "tp")`` serves code that takes a mesh (FSDP2, DTensor, torchtitan, DCP), and
:func:`from_mesh` serves code that takes a collection. A mesh lives as long as the groups: torch
looks them up by name at each use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict, Unpack, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megapg.collection import Lease, ProcessGroupCollection
from megapg.collection.membership import ProcessGroup, membership
from megapg.errors import ForeignGroupError, LayoutError, MissingGroupError
from megapg.layout import Field, ParallelLayout, full_order
from megapg.torch_private import meshes

_MESHES = "meshes"  # key in a lease's scratch
# The axes of a layout's dense grid. A mesh implies no other axes.
_AXES: tuple[Field, ...] = ("tp", "cp", "dp", "pp")


# -- out -------------------------------------------------------------------------------------------


def mesh_of(
    pg: ProcessGroupCollection,
    fields: Sequence[Field],
    device_type: str = "",
    names: Sequence[str] = (),
) -> DeviceMesh:
    """Do the work of :meth:`megapg.ProcessGroupCollection.mesh`, with optional names.

    Args:
        pg: the collection.
        fields: the dimensions, outermost first.
        device_type: the device type of the tensors. Default: as for the method.
        names: the names of the dimensions. Default: the fields.
    """
    pg.require(*fields, owner="mesh()")
    ranks, shape = _grid(pg, fields)
    groups = {
        str(name): _group(pg, field) for name, field in zip(names or fields, fields, strict=True)
    }
    device_type = device_type or _device_type(next(iter(groups.values())))
    made = pg.lease.scratch.get(_MESHES)
    if made is None:
        made = pg.lease.scratch[_MESHES] = _Meshes(pg)
    assert isinstance(made, _Meshes)  # the key is used here only
    key = (*fields, *groups, device_type)
    if key not in made.meshes:
        made.know(pg)
        shaped = torch.tensor(ranks).view(shape)
        made.meshes[key] = meshes.mesh_over(groups, shaped, device_type, _held(pg), made)
    return made.meshes[key]


class _Meshes:
    """The meshes over the groups of one owner. They outlive a re-creation of the groups.

    torch finds a group by its name. The new groups are registered under the old names as well, as
    long as a mesh may use these.
    """

    def __init__(self, pg: ProcessGroupCollection) -> None:
        self.meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._fields: dict[str, str] = {}
        self._listen(pg)

    def know(self, pg: ProcessGroupCollection) -> None:
        """Remember the names of the groups of ``pg``, for a mesh made of them."""
        self._fields |= {group.group_name: field for field, group in _held(pg).items()}

    def _listen(self, pg: ProcessGroupCollection) -> None:
        pg.lease.at_end.append(self._end)
        pg.lease.at_succession.append(self._follow)

    def _end(self) -> None:
        meshes.forget_placements()
        for mesh in self.meshes.values():
            meshes.forget_groups(mesh)
        for name in self._fields:
            meshes.drop_name(name)

    def _follow(self, successor: ProcessGroupCollection) -> None:
        held = _held(successor)
        known = {name: held[field] for name, field in self._fields.items()}
        for name, group in known.items():
            meshes.add_name(name, group)
        for mesh in self.meshes.values():
            meshes.hold_groups(mesh, known)
        successor.lease.scratch[_MESHES] = self
        self._listen(successor)


def _held(pg: ProcessGroupCollection) -> dict[str, ProcessGroup]:
    held = vars(pg)
    return {str(f): held[f] for f in pg.present() if isinstance(held[f], ProcessGroup)}


def _group(pg: ProcessGroupCollection, field: Field) -> ProcessGroup:
    group = getattr(pg, field)
    if not isinstance(group, ProcessGroup):
        raise MissingGroupError(f"mesh(): {field} is {group!r} on this rank, and no group.")
    return group


def _device_type(group: ProcessGroup) -> str:
    on_gpus = any(name in dist.get_backend_config(group) for name in ("nccl", "cuda:torchcomms"))
    return "cuda" if on_gpus else "cpu"


def _grid(pg: ProcessGroupCollection, fields: Sequence[Field]) -> tuple[list[int], list[int]]:
    """Return the ranks of the mesh, the last dimension varying fastest, and its shape."""
    if not fields or len(set(fields)) < len(fields):
        raise LayoutError(f"mesh({', '.join(fields)}): name each dimension, once.")
    layout = pg.layout
    if layout is None and len(fields) > 1:
        raise LayoutError(
            f"mesh({', '.join(fields)}): these groups were made elsewhere, and of those that this "
            "rank is not in nothing is known. Take the mesh from a session, or one field at a time."
        )

    def members(field: Field, rank: int) -> tuple[int, ...]:
        return pg.ranks(field) if layout is None else layout.members(field, rank)

    ranks, shape = [dist.get_rank()], [pg.size(field) for field in fields]
    for field in fields:
        ranks = [each for rank in ranks for each in members(field, rank)]
    if len(ranks) != math.prod(shape) or len(set(ranks)) < len(ranks):
        raise _no_grid(fields, "a rank would be in it more than once")
    for dim, field in enumerate(fields):
        stride, size = math.prod(shape[dim + 1 :]), shape[dim]
        for first in (at for at in range(len(ranks)) if at // stride % size == 0):
            line, group = (
                ranks[first : first + stride * size : stride],
                members(field, ranks[first]),
            )
            if tuple(line) != group:
                raise _no_grid(fields, f"{list(group)}, a group of {field}, is no line of it")
    return ranks, shape


def _no_grid(fields: Sequence[Field], why: str) -> LayoutError:
    return LayoutError(
        f"mesh({', '.join(fields)}): these fields form no grid: {why}. Each has to be independent "
        "of the others, as dp_cp, tp and pp are, or expt_dp, ep and expt_tp."
    )


# -- in --------------------------------------------------------------------------------------------


class Dimensions(TypedDict, total=False):
    """Names of a mesh's dimensions by field, as :func:`from_mesh` takes them."""

    tp: str
    pp: str
    mp: str
    embd: str
    pos_embd: str
    cp: str
    tp_cp: str
    ep: str
    expt_tp: str
    tp_ep: str
    tp_ep_pp: str
    tp_ep_pp_with_egtp_remat: str
    tp_dp: str
    tp_dp_cp: str
    dp: str
    dp_cp: str
    dp_cp_ag: str
    dp_cp_gtp_remat: str
    gtp_remat: str
    expt_gtp_remat: str
    expt_dp: str
    expt_dp_ag: str
    expt_dp_gtp_remat: str
    intra_dp_cp: str
    intra_expt_dp: str
    inter_dist_opt: str
    intra_dist_opt: str


def from_mesh(mesh: DeviceMesh, **dimensions: Unpack[Dimensions]) -> ProcessGroupCollection:
    """Create a collection of a mesh's groups. megapg never closes them.

    Args:
        mesh: torch's, or torchtitan's ``parallel_dims.world_mesh``.
        **dimensions: field -> the name of the mesh's dimension, for example ``dp="dp_shard"``.
            Flattened dimensions have names as well, as ``dp_cp="dp_cp"``. Other fields are absent.

    Returns:
        A collection with the layout that ``tp``, ``cp``, ``dp`` and ``pp`` imply.

    Raises:
        UnknownFieldError: a name is no field.
        ForeignGroupError: the mesh has no such dimension, its groups have ended, or it is no
            DeviceMesh.
        LayoutError: the product of the sizes is not the mesh's, or the groups are not those of the
            layout.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ForeignGroupError(f"from_mesh() takes a torch.distributed.DeviceMesh, not {mesh!r}.")
    names = cast("dict[Field, str]", dimensions)
    groups = {field: _of(mesh, name) for field, name in names.items()}
    collection = ProcessGroupCollection.from_groups(**groups)  # type: ignore[arg-type]
    members = {str(field): membership(field, group) for field, group in groups.items()}
    layout = _implied(mesh, collection)
    lease = Lease(owner="groups passed to from_mesh()")
    return ProcessGroupCollection(vars(collection), members, lease, layout)


def _of(mesh: DeviceMesh, name: str) -> ProcessGroup:
    try:
        return mesh.get_group(name)
    except (KeyError, RuntimeError, ValueError) as error:
        names = ", ".join(mesh.mesh_dim_names or ()) or "no names"
        raise ForeignGroupError(
            f"from_mesh(): the mesh gives no live group for {name!r}; its dimensions are {names}. "
            "If it has ended with its session, take a new one: pg.mesh(...)."
        ) from error


def _implied(mesh: DeviceMesh, pg: ProcessGroupCollection) -> ParallelLayout:
    ranks, present = _in_order(mesh.mesh), pg.present()
    sizes = {axis: pg.size(axis) for axis in _AXES if axis in present}
    if math.prod(sizes.values()) != len(ranks):
        raise LayoutError(
            f"from_mesh(): {' x '.join(f'{k}={v}' for k, v in sizes.items()) or 'no axis'} is not "
            f"{len(ranks)}, the ranks of the mesh. Give tp, cp, dp and pp each the name of a "
            "dimension, as far as they are larger than 1; several dimensions are one once they are "
            "flattened."
        )
    strides = {
        axis: ranks.index((each := pg.ranks(axis))[1]) - ranks.index(each[0])
        for axis in sizes
        if sizes[axis] > 1
    }
    order = full_order([axis for axis, _ in sorted(strides.items(), key=lambda each: each[1])])
    layout = ParallelLayout(
        world_size=len(ranks),
        tp=sizes.get("tp", 1),
        cp=sizes.get("cp", 1),
        pp=sizes.get("pp", 1),
        order=order,
        ranks=ranks,
    )
    for field in present:
        expected = layout.members(field, dist.get_rank())
        if expected != pg.ranks(field):
            raise LayoutError(
                f"from_mesh(): {field} has the ranks {list(pg.ranks(field))} here, and in the "
                f"layout of the other fields, with order={layout.order!r}, {list(expected)}."
            )
    return layout


def _in_order(ranks: torch.Tensor) -> list[int]:
    """Return the ranks of a mesh in the order for a layout.

    Ascending if some order of the dimensions is ascending, else in the mesh's order.
    """
    given: list[int] = ranks.flatten().tolist()
    last = [int(ranks.select(dim, -1).flatten()[0]) for dim in range(ranks.dim())]
    outermost_first = sorted(range(ranks.dim()), key=lambda dim: -last[dim])
    ascending = sorted(given)
    reordered = ranks.permute(outermost_first).flatten().tolist()
    return ascending if reordered == ascending else given
