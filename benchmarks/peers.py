"""The contestants: ways to get the process groups of one Megatron layout.

Each contestant is a function that expects a WORLD, makes its groups, and returns them by field. The
benchmark imports this module before it forks the ranks, so no contestant pays for imports.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from torch.distributed.device_mesh import init_device_mesh

from megapg import session, torch_private
from megapg.communicators.backends import backend_for
from megapg.communicators.needed import Recipe, communicators
from megapg.communicators.world import current_world, scoped_environment
from megapg.layout import ParallelLayout
from megapg.megatron import initialize_model_parallel, parallel_state

Groups = Mapping[str, dist.ProcessGroup | None]

_MODEL = ("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp")
_EXPERT = ("ep", "expt_tp", "tp_ep", "tp_ep_pp", "expt_dp", "intra_expt_dp")
_DATA = ("tp_dp", "tp_dp_cp", "dp", "dp_cp", "intra_dp_cp", "intra_dist_opt")
FIELDS = (*_MODEL, *_EXPERT, *_DATA)
"""What a contestant must provide, unless it says otherwise: what Megatron-core 0.16 has globals
for, without hierarchical context parallelism and with one optimizer instance."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a layout. Context parallelism is 1; data parallelism is the rest."""

    tp: int
    pp: int
    ep: int

    def fits(self, world_size: int) -> bool:
        """True if the dense and the expert grid both fit this number of ranks."""
        return world_size % (self.tp * self.pp) == world_size % (self.tp * self.ep * self.pp) == 0

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp}" + (f" ep={self.ep}" if self.ep > 1 else "")


def megapg_session(shape: Shape) -> Groups:
    opened = session(tp=shape.tp, pp=shape.pp, ep=shape.ep)
    atexit.register(opened.close)  # keeps it open until the exit
    return {field: getattr(opened.groups, field) for field in FIELDS}


def bare_torch(shape: Shape) -> Groups:
    """Make a session's communicators without a session: no rendezvous, comparison or confirmation.

    This is torch's own cost, with lazy connections as in a session.
    """
    layout = ParallelLayout(world_size=dist.get_world_size(), tp=shape.tp, pp=shape.pp, ep=shape.ep)
    recipe = Recipe("gloo", {}, {}, frozenset(), all_gather_groups=False)
    world = current_world()
    groups: dict[str, dist.ProcessGroup | None] = {}
    with scoped_environment(backend_for("gloo").creation_environment):
        for communicator in communicators(layout, recipe, world.rank):
            wanted = torch_private.NewGroup(
                communicator.ranks, "gloo", communicator.label, "", world.timeout
            )
            group = torch_private.new_group(wanted, world.rank, world.store.torch)
            groups |= dict.fromkeys(communicator.fields, group)
    return groups


def megatrons(shape: Shape, *, gloo_twins: bool) -> Groups:
    """Megatron's own; by default with a second gloo group for each data parallel group."""
    ps = parallel_state
    ps.initialize_model_parallel(
        tensor_model_parallel_size=shape.tp,
        pipeline_model_parallel_size=shape.pp,
        expert_model_parallel_size=shape.ep,
        create_gloo_process_groups=gloo_twins,
    )
    return {
        "tp": ps.get_tensor_model_parallel_group(),
        "pp": ps.get_pipeline_model_parallel_group(),
        "mp": ps.get_model_parallel_group(),
        "embd": ps.get_embedding_group(check_initialized=False),
        "pos_embd": ps.get_position_embedding_group(check_initialized=False),
        "cp": ps.get_context_parallel_group(),
        "tp_cp": ps.get_tensor_and_context_parallel_group(),
        "ep": ps.get_expert_model_parallel_group(),
        "expt_tp": ps.get_expert_tensor_parallel_group(),
        "tp_ep": ps.get_expert_tensor_and_model_parallel_group(),
        "tp_ep_pp": ps.get_expert_tensor_model_pipeline_parallel_group(),
        "tp_dp": ps.get_tensor_and_data_parallel_group(),
        "tp_dp_cp": ps.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "dp": ps.get_data_parallel_group(),
        "dp_cp": ps.get_data_parallel_group(with_context_parallel=True),
        "expt_dp": ps.get_expert_data_parallel_group(),
        "intra_dp_cp": ps.get_data_parallel_group(
            with_context_parallel=True, partial_data_parallel=True
        ),
        "intra_expt_dp": ps.get_expert_data_parallel_group(partial_expert_data_parallel=True),
        "intra_dist_opt": ps.get_intra_distributed_optimizer_instance_group(),
    }


def drop_in(shape: Shape) -> Groups:
    """Groups as in a fork of Megatron-LM that changes one import, or runs megapg.megatron.run."""
    pg = initialize_model_parallel(shape.tp, shape.pp, expert_model_parallel_size=shape.ep).groups
    return {field: getattr(pg, field) for field in FIELDS}


# field -> its dimensions, on the dense and on the expert grid.
_DENSE_DIMS = {
    "tp": ["tp"],
    "cp": ["cp"],
    "pp": ["pp"],
    "dp": ["dp"],
    "mp": ["tp", "pp"],
    "tp_cp": ["tp", "cp"],
    "tp_dp": ["tp", "dp"],
    "tp_dp_cp": ["tp", "cp", "dp"],
    "dp_cp": ["cp", "dp"],
}
_EXPERT_DIMS = {
    "ep": ["ep"],
    "expt_tp": ["tp"],
    "expt_dp": ["dp"],
    "tp_ep": ["tp", "ep"],
    "tp_ep_pp": ["tp", "ep", "pp"],
    # Not in Megatron-Bridge; added so that all contestants have the same fields.
    "intra_dist_opt": ["tp", "ep", "dp", "pp"],
}


def hyper_comm_grids(shape: Shape) -> Groups:
    """The recipe of Megatron-Bridge's decentralised groups: two grids, and separate embeddings."""
    size, model = dist.get_world_size(), shape.tp * shape.pp
    dense = HyperCommGrid(
        [shape.tp, 1, size // model, shape.pp], ["tp", "cp", "dp", "pp"], backend="gloo"
    )
    expert = HyperCommGrid(
        [shape.tp, shape.ep, size // (model * shape.ep), shape.pp],
        ["tp", "ep", "dp", "pp"],
        backend="gloo",
    )
    groups: dict[str, dist.ProcessGroup | None] = {}
    groups |= {field: dense.create_pg(dims) for field, dims in _DENSE_DIMS.items()}
    groups |= {field: expert.create_pg(dims) for field, dims in _EXPERT_DIMS.items()}
    for pipeline in dense._gen_rank_enum(["pp"]):
        first_and_last = pipeline if len(pipeline) == 1 else [pipeline[0], pipeline[-1]]
        for field, ranks in (("embd", first_and_last), ("pos_embd", pipeline[:1])):
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                groups[field] = group
    return groups | {"intra_dp_cp": groups["dp_cp"], "intra_expt_dp": groups["expt_dp"]}


def device_mesh(shape: Shape) -> Groups:
    """torch's own mesh. It has the four dense axes, and no combined or expert fields."""
    names = ("pp", "dp", "cp", "tp")  # a mesh varies its last dimension fastest
    size = dist.get_world_size()
    sizes = (shape.pp, size // (shape.tp * shape.pp), 1, shape.tp)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return {name: mesh.get_group(name) for name in names}


@dataclass(frozen=True)
class Contestant:
    """One way to get the groups.

    Attributes:
        name: for the tables.
        create: makes the groups, given a shape.
        fields: the fields that it provides on every rank (the two embedding fields: on some).
    """

    name: str
    create: Callable[[Shape], Groups]
    fields: tuple[str, ...] = FIELDS


SESSION = Contestant("megapg.session", megapg_session)
FLOOR = Contestant("its communicators, by torch alone", bare_torch)
BASELINE = Contestant("initialize_model_parallel", partial(megatrons, gloo_twins=False))
CONTESTANTS = (
    SESSION,
    BASELINE,
    Contestant("the same, with gloo twins", partial(megatrons, gloo_twins=True)),
    Contestant("megapg's drop-in, with gloo twins", drop_in),
    Contestant("HyperCommGrid", hyper_comm_grids),
    Contestant("init_device_mesh, 4 fields", device_mesh, ("tp", "cp", "dp", "pp")),
    FLOOR,
)
