"""The groups and meshes that Megatron-FSDP (``megatron.core.distributed.fsdp``) shards over.

Megatron-core's adapter numbers the ranks of its meshes itself, from 0 to WORLD's last rank, in one
order. It fails, or pairs groups with the wrong ranks, if a layout has another order, covers only
part of WORLD, or has pipeline stages. A layout knows the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.errors import LayoutError, NoCollectionError, UnsupportedOptionError
from megapg.megatron.core import fsdp_module, parameters_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from megapg.layout import Field

# The adapter's names of the dimensions. Megatron-FSDP requires the same ones in both meshes.
_OUTER, _INNER, _TP = "outer_fsdp_dp", "dp_cp", "tp"


class FsdpIndex(Protocol):
    """The part of Megatron-FSDP's ``FSDPDistributedIndex`` that is used here."""

    device_mesh: DeviceMesh
    expt_device_mesh: DeviceMesh
    fsdp_group_ag: ProcessGroup | None

    def get_dp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """Return the group over which gradients are summed."""
        ...

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> ProcessGroup | None:
        """Return the group over which weights are sharded."""
        ...


class FsdpConfig(Protocol):
    """The part of a ``DistributedDataParallelConfig`` that is read here."""

    num_distributed_optimizer_instances: int
    outer_dp_sharding_strategy: str


def fsdp_index(pg: ProcessGroupCollection, ddp_config: FsdpConfig) -> FsdpIndex:
    """Return the groups and meshes of a session for ``MegatronFSDP(dist_index=...)``.

    No group is made, and the globals are not read. The dense layers are sharded over ``dp_cp``, the
    experts over ``expt_dp``. With several optimizer instances, these are ``intra_dp_cp`` and
    ``intra_expt_dp``, and ``inter_dist_opt`` is the outer dimension. If the session has
    ``all_gather_groups=True`` and one instance, all-gathers have separate groups.

    Megatron-core 0.16 flattens a mesh of experts to gather whole tensors; this is not possible
    here, because there is no such group. If a session is suspended and resumed, the meshes find the
    new groups, and :meth:`megapg.Session.rebind` replaces the others.

    Args:
        pg: the groups of a session; a stage of a pipeline has its own meshes.
        ddp_config: that of the model.

    Raises:
        LayoutError: the layout has another number of instances than ``ddp_config``, or instances
            that form no grid with the other axes.
        UnsupportedOptionError: weights are sharded by GTP as well, or the installed Megatron-core
            can't spread experts otherwise than the dense layers with several instances.
        UnsupportedVersionError: Megatron-FSDP can't be imported, or torch is older than 2.13.
        StaleGroupError: the session has ended.
    """
    index_class = fsdp_module().FSDPDistributedIndex
    takes = parameters_of(index_class.__init__.__code__)
    layout = pg.require(owner="fsdp_index()").layout
    given, instances = ddp_config.num_distributed_optimizer_instances, 1
    if layout is not None:
        instances = layout.optimizer_instances
        if layout.gtp_remat * layout.expt_gtp_remat > 1:
            raise UnsupportedOptionError(
                "fsdp_index(): gtp_remat and expt_gtp_remat shard the weights already; Megatron-"
                "FSDP has no axis for that. Open the session without them."
            )
    if given != instances:
        raise LayoutError(
            f"fsdp_index(): num_distributed_optimizer_instances={given} in the ddp_config, and "
            f"optimizer_instances={instances} in the session's layout. Give both the same."
        )
    hybrid = instances > 1
    dense = _mesh(pg, ("inter_dist_opt", "intra_dp_cp", "tp") if hybrid else ("dp_cp", "tp"))
    experts = _mesh(
        pg, ("inter_dist_opt", "intra_expt_dp", "expt_tp") if hybrid else ("expt_dp", "expt_tp")
    )
    twin = None if hybrid else pg.dp_cp_ag  # inner groups of several instances have none
    arguments = {
        "device_mesh": dense,
        "expt_device_mesh": experts,
        "dp_outer_dim": _OUTER if hybrid else None,
        "dp_shard_dim": _INNER,
        "tp_dim": _TP,
        "hsdp_outer_dp_shard": hybrid and ddp_config.outer_dp_sharding_strategy != "no_shard",
        "hybrid_fsdp_group": pg.dp_cp if hybrid else None,
        "hybrid_fsdp_expt_group": pg.expt_dp if hybrid else None,
        "fsdp_group_ag": twin,
        "expt_fsdp_group_ag": None if hybrid else pg.expt_dp_ag,
    }
    alike = dense.mesh.tolist() == experts.mesh.tolist()
    if hybrid and not alike and "hybrid_fsdp_expt_group" not in takes:
        raise UnsupportedOptionError(
            "fsdp_index(): this Megatron-core's Megatron-FSDP shards experts as it does the dense "
            "layers where the optimizer has several instances. Open the session with ep=1 and "
            "without expt_tp or with optimizer_instances=1, or install Megatron-core 0.19."
        )
    taken = {name: value for name, value in arguments.items() if name in takes}
    index = cast("FsdpIndex", index_class(**taken))
    index.fsdp_group_ag = twin  # 0.16 has just read this from the globals
    return index


@functools.cache
def fsdp_adapter() -> type[torch.nn.Module]:
    """Return Megatron-core's ``FullyShardedDataParallel`` for Megatron-FSDP, based on
    :func:`fsdp_index`.

    The class uses the index of its ``pg_collection`` instead of its own numbering of ranks. It is a
    subclass with upstream's arguments. In Megatron-core 0.16 its ``__init__`` still reads the sizes
    of tensor parallelism from the globals: call it inside of ``published(pg)`` there.

    Raises:
        UnsupportedVersionError: as :func:`fsdp_index`.
    """
    upstreams: type[torch.nn.Module] = fsdp_module().FullyShardedDataParallel

    def init_dist_index(self: _Adapter, pg_collection: ProcessGroupCollection | None) -> FsdpIndex:
        if not isinstance(pg_collection, ProcessGroupCollection):
            raise NoCollectionError(
                f"{upstreams.__name__}: pg_collection is {type(pg_collection).__name__}; pass the "
                "groups of a session, which know the ranks of the others."
            )
        self.tp_group = pg_collection.tp
        return fsdp_index(pg_collection, self.ddp_config)

    return type(upstreams.__name__, (upstreams,), {"_init_dist_index": init_dist_index})


class _Adapter(Protocol):
    ddp_config: FsdpConfig
    tp_group: ProcessGroup


def _mesh(pg: ProcessGroupCollection, fields: Sequence[Field]) -> DeviceMesh:
    from megapg.collection.mesh import mesh_of

    return mesh_of(pg, fields, names=(_OUTER, _INNER, _TP)[-len(fields) :])
