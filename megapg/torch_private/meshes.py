"""What megapg takes from torch's meshes and from DTensor without a promise."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh

from megapg.errors import LayoutError, UnsupportedVersionError
from megapg.torch_private import as_name, version


class _Dimension(str):
    """The name of a mesh's dimension: equal to the text, and to the same name in another mesh only
    where both are of one owner. torch compares meshes by their ranks and names alone, so that two
    sessions would share what DTensor remembers of a mesh.
    """

    owner: object

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Dimension) and other.owner is not self.owner:
            return False
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class _Mesh(DeviceMesh):
    """A mesh over groups that exist, which never makes one."""

    _fields: Mapping[str, tuple[tuple[int, ...], str]]  # of the root: the ranks, torch's name
    _owner: object

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        own = {name: name for name in self.mesh_dim_names or ()}
        if len(wanted) == 1 and wanted[0] not in own:
            return self._flattened(wanted[0])
        part = super().__getitem__(tuple(own.get(name, name) for name in wanted))
        return self._adopt(part)

    def _adopt(self, part: DeviceMesh) -> DeviceMesh:
        if part is not self:
            part.__class__ = _Mesh  # torch makes a plain one of it
        return part

    def _flattened(self, name: str) -> DeviceMesh:
        """The mesh of a field that several dimensions make up."""
        dimensions, fields = self.mesh_dim_names or (), vars(self._get_root_mesh())["_fields"]
        for count in range(2, len(dimensions) + 1) if name in fields else ():
            for some in itertools.combinations(dimensions, count):
                part = self if some == dimensions else self[some]
                if tuple(part.mesh.flatten().tolist()) == fields[name][0]:
                    return part._flatten(name)
        raise LayoutError(
            f"mesh[{name!r}]: this is no dimension of the mesh of {', '.join(dimensions)}, and no "
            "field that some of them make up, in this order."
        )

    def _create_flatten_mesh(self, mesh_dim_name: str, *_: object, **__: object) -> None:
        root = self._get_root_mesh()
        if mesh_dim_name in root._flatten_mapping:
            return
        ranks, fields = tuple(self.mesh.flatten().tolist()), vars(root)["_fields"]
        of_name = [fields[mesh_dim_name]] if mesh_dim_name in fields else []
        named = next((of for held, of in (*of_name, *fields.values()) if held == ranks), None)
        if named is None:
            raise LayoutError(
                f"no field of the collection has the ranks {list(ranks)} in this order; a mesh "
                "of groups makes none."
            )
        name = _Dimension(mesh_dim_name)
        name.owner = vars(root)["_owner"]
        flat = _Mesh(
            root.device_type,
            _layout=type(self._layout)([self._layout.collapse()]),
            _rank_map=root._rank_map,
            mesh_dim_names=(name,),
            _root_mesh=root,
            _init_backend=False,
        )
        flat._dim_group_names = [named]
        root._pg_registry[named] = _c10d._resolve_process_group(as_name(named))
        root._flatten_mapping[name] = flat

    def _create_unflatten_mesh(self, *_: object, **__: object) -> DeviceMesh:
        raise LayoutError(
            "a mesh of a collection makes no group, so it can't be unflattened; name the fields of "
            "the smaller dimensions: pg.mesh(...)."
        )


FINDING_NEW_GROUPS: tuple[type, ...] = (_Mesh,)
"""Classes whose instances know groups by name, and find those that are made anew."""


def can_mesh() -> bool:
    """Whether slices of a mesh can keep to groups that exist: :func:`mesh_over`. Up to 2.10 torch
    makes groups there, and up to 2.12 it lays flattened meshes out another way.

    Public: none that asks.
    """
    return version() >= (2, 13)


def mesh_over(
    groups: Mapping[str, dist.ProcessGroup],
    ranks: torch.Tensor,
    device_type: str,
    fields: Mapping[str, dist.ProcessGroup],
    owner: object,
) -> DeviceMesh:
    """A mesh over groups that exist.

    Args:
        groups: dimension -> its group, the outermost first.
        ranks: all of them, in the mesh's shape.
        device_type: ``cpu``, ``cuda``.
        fields: all groups of this rank, by their names: for slices that are flattened.
        owner: of the groups; meshes of two owners are never equal.

    Raises:
        UnsupportedVersionError: this torch makes groups where it slices a mesh.

    Public: ``DeviceMesh.from_group``, once slices of it keep to groups that exist.
    """
    if not can_mesh():
        raise UnsupportedVersionError(
            f"torch {torch.__version__} is installed; a mesh over groups that exist takes 2.13 or "
            "newer. Pass the groups themselves, or make the mesh with torch's init_device_mesh()."
        )
    names = [_Dimension(name) for name in groups]
    for name in names:
        name.owner = owner
    mesh = DeviceMesh.from_group(
        list(groups.values()), device_type, ranks, mesh_dim_names=tuple(names)
    )
    mesh.__class__ = _Mesh
    known = {
        name: (tuple(dist.get_process_group_ranks(group)), group.group_name)
        for name, group in fields.items()
    }
    vars(mesh).update(_fields=known, _owner=owner)
    return mesh


def forget_groups(mesh: DeviceMesh) -> None:
    """Have a mesh hold no group; it finds them by their names, but while torch compiles.

    Public: none.
    """
    mesh._pg_registry.clear()


def hold_groups(mesh: DeviceMesh, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Have a mesh hold groups by the names that it knows, where torch compiles.

    Public: none.
    """
    mesh._pg_registry.update(groups)


def add_name(name: str, group: dist.ProcessGroup) -> None:
    """Have torch find a group by one more name.

    Public: none.
    """
    _c10d._register_process_group(as_name(name), group)


def drop_name(name: str) -> None:
    """Have torch find nothing by a name.

    Public: none.
    """
    _c10d._unregister_process_group(as_name(name))


def forget_placements() -> None:
    """Have DTensor forget what it worked out for meshes, which it holds on to.

    Public: none.
    """
    debug = sys.modules.get("torch.distributed.tensor.debug")
    if debug is not None:
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
