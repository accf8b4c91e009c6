"""Private names of torch's meshes and of DTensor."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from megapg.errors import LayoutError, UnsupportedVersionError
from megapg.torch_private import as_name, version


class _Dimension(str):
    """The name of a mesh's dimension: equal to the text, but not to a name of another owner.

    torch compares meshes only by ranks and names, so two sessions would otherwise share the results
    that DTensor caches for a mesh.
    """

    owner: object

    @override
    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Dimension) and other.owner is not self.owner:
            return False
        return str.__eq__(self, other)

    @override
    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    @override
    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class _Mesh(DeviceMesh):
    """A mesh over existing groups, which never creates a group."""

    # on the root: field -> ranks, torch's name of the group
    _fields: Mapping[str, tuple[tuple[int, ...], str]]
    _owner: object

    @override
    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        wanted = (names,) if isinstance(names, str) else tuple(names)
        own = {name: name for name in self.mesh_dim_names or ()}
        if len(wanted) == 1 and wanted[0] not in own:
            return self._flattened(wanted[0])
        part = super().__getitem__(tuple(own.get(name, name) for name in wanted))
        return self._adopt(part)

    def _adopt(self, part: DeviceMesh) -> DeviceMesh:
        if part is not self:
            part.__class__ = _Mesh  # torch made a plain DeviceMesh
        return part

    def _flattened(self, name: str) -> DeviceMesh:
        """Return the mesh of a field that combines several dimensions."""
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

    @override
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

    @override
    def _create_unflatten_mesh(self, *_: object, **__: object) -> DeviceMesh:
        raise LayoutError(
            "a mesh of a collection makes no group, so it can't be unflattened; name the fields of "
            "the smaller dimensions: pg.mesh(...)."
        )


FINDING_NEW_GROUPS: tuple[type, ...] = (_Mesh,)
"""Classes whose instances look groups up by name, and so find re-created ones."""


def can_mesh() -> bool:
    """True if slices of a mesh can use existing groups; see :func:`mesh_over`.

    Up to 2.10 torch creates groups for slices, and up to 2.12 flattened meshes have another layout.

    Public: none.
    """
    return version() >= (2, 13)


def mesh_over(
    groups: Mapping[str, dist.ProcessGroup],
    ranks: torch.Tensor,
    device_type: str,
    fields: Mapping[str, dist.ProcessGroup],
    owner: object,
) -> DeviceMesh:
    """Create a mesh over existing groups.

    Args:
        groups: dimension -> its group, outermost first.
        ranks: all ranks, in the mesh's shape.
        device_type: ``cpu``, ``cuda``.
        fields: all groups of this rank by field, for flattened slices.
        owner: the owner of the groups. Meshes of two owners are never equal.

    Raises:
        UnsupportedVersionError: this torch creates groups when it slices a mesh.

    Public: ``DeviceMesh.from_group``, once its slices use existing groups.
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
    """Drop a mesh's references to groups. It then finds them by name, except in torch.compile.

    Public: none.
    """
    mesh._pg_registry.clear()


def hold_groups(mesh: DeviceMesh, groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Give a mesh references to groups by the names that it knows, for torch.compile.

    Public: none.
    """
    mesh._pg_registry.update(groups)


def add_name(name: str, group: dist.ProcessGroup) -> None:
    """Register another name for a group in torch.

    Public: none.
    """
    _c10d._register_process_group(as_name(name), group)


def drop_name(name: str) -> None:
    """Remove a name of a group from torch.

    Public: none.
    """
    _c10d._unregister_process_group(as_name(name))


def forget_placements() -> None:
    """Clear DTensor's cache, which keeps meshes alive.

    Public: none.
    """
    debug = sys.modules.get("torch.distributed.tensor.debug")
    if debug is not None:
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
