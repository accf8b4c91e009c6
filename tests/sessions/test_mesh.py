"""A collection as a DeviceMesh: slices, training, the end; and a mesh as a collection."""

import gc
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megapg
from megapg import torch_private
from megapg.errors import (
    ForeignGroupError,
    LayoutError,
    MissingGroupError,
    SessionError,
    StaleGroupError,
    UnknownFieldError,
)
from megapg.testing import run_distributed
from megapg.torch_private.meshes import can_mesh

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not can_mesh(), reason="meshes take torch 2.13"),
]
STEPS = 3


def refused(doing, error=LayoutError):
    with pytest.raises(error) as caught:
        doing()
    return str(caught.value)


def net():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def batch(step, replica, replicas):
    """Return the part of a step's batch for one replica."""
    torch.manual_seed(step)
    return torch.randn(8, 8).chunk(replicas)[replica]


def train(model, replica=0, replicas=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, replica, replicas)).square().mean().backward()
        optimizer.step()
    return [
        each.full_tensor().detach() if isinstance(each, DTensor) else each.detach()
        for each in model.parameters()
    ]


def remembered_placements():
    """Return the number of entries in DTensor's caches, in Python and in C++."""
    in_python = debug._get_python_sharding_prop_cache_info().currsize
    return in_python + sum(debug._get_fast_path_sharding_prop_cache_stats())


def same(found, expected):
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))


# --- slices ---------------------------------------------------------------------------------------


def slices():
    with megapg.session(tp=2, cp=2, pp=2) as session:
        pg, before = session.groups, torch_private.known_groups()
        mesh = pg.mesh("pp", "dp", "cp", "tp")
        assert mesh.mesh_dim_names == ("pp", "dp", "cp", "tp")
        assert mesh.shape == (2, 1, 2, 2)
        assert mesh.device_type == "cpu"
        assert mesh.mesh.flatten().tolist() == list(range(8))
        for field in mesh.mesh_dim_names:
            assert mesh[field].get_group() is mesh.get_group(field) is getattr(pg, field)
            assert mesh[field].get_local_rank() == pg.rank(field)
        # Groups over several dimensions.
        assert mesh["dp_cp"].get_group() is pg.dp_cp
        assert mesh["dp", "cp"]._flatten("dp_cp").get_group() is pg.dp_cp
        assert mesh["cp", "tp"]._flatten().get_group() is pg.tp_cp
        assert mesh["dp", "cp", "tp"]["tp"].get_group() is pg.tp
        assert mesh["mp"].get_group() is mesh["pp", "tp"]._flatten("mp").get_group() is pg.mp
        assert "'ep'" in refused(lambda: mesh["ep"])
        assert "makes none" in refused(mesh["pp", "cp"]._flatten)
        refused(lambda: mesh._unflatten(0, (2, 1), ("a", "b")))
        # Any order, parts of the layout, and the expert grid.
        other = pg.mesh("tp", "dp_cp", "pp")
        assert other["tp"].get_group() is pg.tp
        assert other["pp"].get_group() is pg.pp
        assert pg.mesh("tp", "dp_cp", "pp") is other
        assert pg.mesh("mp", "dp_cp").get_group("mp") is pg.mp
        assert pg.mesh("expt_dp", "expt_tp")["expt_dp"].get_group() is pg.expt_dp
        assert pg.mesh("tp").get_group() is pg.tp
        # Fields that form no grid.
        assert "more than once" in refused(lambda: pg.mesh("dp_cp", "cp"))
        assert "once" in refused(lambda: pg.mesh("tp", "tp"))
        refused(lambda: pg.mesh())
        refused(lambda: pg.mesh("tpp"), UnknownFieldError)
        refused(lambda: pg.mesh("inter_dist_opt"), MissingGroupError)
        if pg.pos_embd is not None:  # only ranks of the first stage have one
            said = refused(lambda: pg.mesh("pos_embd", "pp"))
            assert "no line of it" in said
        if pg.embd is None:
            refused(lambda: pg.mesh("embd"), MissingGroupError)
        borrowed = megapg.ProcessGroupCollection.from_groups(tp=pg.tp, pp=pg.pp)
        assert borrowed.mesh("tp").get_group() is pg.tp
        assert "made elsewhere" in refused(lambda: borrowed.mesh("pp", "tp"))
        assert torch_private.known_groups() == before
        # A session over a part of the job.
        if dist.get_rank() >= 4:
            with megapg.session(name="half", tp=2, ranks=range(4, 8)) as half:
                part = half.groups.mesh("dp", "tp")
                assert part.mesh.tolist() == [[4, 5], [6, 7]]
                one = DTensor.from_local(torch.ones(1), part["tp"], [Shard(0)])
                assert one.full_tensor().sum() == 2
        # Two sessions of one shape: DTensor does not confuse them.
        with megapg.session(name="second", tp=2, cp=2, pp=2) as second:
            twin = second.groups.mesh("pp", "dp", "cp", "tp")
            assert mesh != twin
            assert mesh["tp"] != twin["tp"]
            assert mesh["dp_cp"] != twin["dp_cp"]
            assert DeviceMesh._concatenate([mesh["cp"], mesh["tp"]]) != DeviceMesh._concatenate(
                [twin["cp"], twin["tp"]]
            )
            for each in (mesh, twin):
                got = distribute_tensor(torch.ones(4, 4), each["tp"], [Shard(0)]) * 2
                assert got.device_mesh.get_group() is each["tp"].get_group()
                assert got.redistribute(placements=[Replicate()]).to_local().sum() == 32
        assert mesh["tp"].get_group() is pg.tp


def test_slices() -> None:
    run_distributed(slices, world_size=8)


# --- training -------------------------------------------------------------------------------------


def training(folder):
    expected = train(net())
    with megapg.session(tp=2) as session:
        pg = session.groups
        mesh = pg.mesh("dp_cp", "tp")
        replica, replicas = pg.rank("dp_cp"), pg.size("dp_cp")
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

        sharded = net()
        fully_shard(sharded, mesh=mesh["dp_cp"])
        assert same(train(sharded, replica, replicas), expected)

        split = parallelize_module(net(), mesh["tp"], plan)
        assert same(train(split), expected)

        together = parallelize_module(net(), mesh["tp"], plan)
        fully_shard(together, mesh=mesh["dp_cp"])
        assert same(train(together, replica, replicas), expected)

        dcp.save({"model": together.state_dict()}, checkpoint_id=folder)
        loaded = parallelize_module(net(), mesh["tp"], plan)
        fully_shard(loaded, mesh=mesh["dp_cp"])
        dcp.load({"model": loaded.state_dict()}, checkpoint_id=folder)
        assert same([each.full_tensor() for each in loaded.parameters()], expected)
        assert remembered_placements() > 0

    # After the end, megapg refuses the mesh and DTensor holds no groups.
    refused(lambda: pg.mesh("tp"), StaleGroupError)
    assert "ended" in refused(lambda: megapg.from_mesh(mesh, tp="tp"), ForeignGroupError)
    assert remembered_placements() == 0


def test_real_steps_equal_plain_ones(tmp_path: Path) -> None:
    run_distributed(partial(training, tmp_path / "checkpoint"), world_size=4)


def renewed():
    expected = train(net())
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    with megapg.session(tp=2) as session:
        old = session.groups.mesh("dp_cp", "tp")
        first = [weakref.ref(group) for group in (session.groups.tp, session.groups.dp_cp)]
        split = parallelize_module(net(), old["tp"], plan)
        total = distribute_tensor(torch.ones(2), old["tp"], [Shard(0)])
        for field in ("tp", "dp_cp"):
            total + total
            assert remembered_placements() > 0
            session.suspend()
            refused(lambda: session.groups.mesh("tp"), SessionError)
            refused(lambda: megapg.from_mesh(old, tp="tp", dp="dp_cp"), ForeignGroupError)
            assert remembered_placements() == 0
            session.resume()
            # The old mesh finds the new groups by its names; the new groups have other names
            # internally.
            assert old["tp"].get_group() is session.groups.tp
            # A new mesh goes through the next cycle, too.
            added = session.groups.mesh(field)
            assert added.get_group() is getattr(session.groups, field)
            mesh = session.groups.mesh("dp_cp", "tp")
            total = total + distribute_tensor(torch.ones(2), mesh["tp"], [Shard(0)])
            assert added._pg_registry[added._dim_group_names[0]] is added.get_group()
        assert session.groups.mesh("tp").get_group() is session.groups.tp
        assert total.full_tensor().tolist() == [3, 3]
        assert same(train(split), expected)
        flat = session.groups.mesh("dp", "tp")["dp", "tp"]._flatten("tp_dp")
        assert flat.get_group() is session.groups.tp_dp
    refused(lambda: megapg.from_mesh(old, tp="tp", dp="dp_cp"), ForeignGroupError)
    gc.collect()
    assert [each() for each in first] == [None, None]


def test_a_mesh_finds_groups_that_are_made_anew() -> None:
    run_distributed(renewed, world_size=4)


# --- in -------------------------------------------------------------------------------------------


def taken_in():
    # The dimensions of torchtitan, in torchtitan's order.
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    pg = megapg.from_mesh(mesh, pp="pp", dp="dp_shard", tp="tp")
    assert pg.tp is mesh.get_group("tp")
    assert pg.rank("tp") == mesh.get_local_rank("tp")
    assert pg.present() == ("tp", "pp", "dp")
    assert pg.layout is not None
    assert (pg.layout.tp, pg.layout.pp, pg.layout.dp) == (2, 2, 1)
    assert pg.mesh("pp", "tp").mesh.tolist() == [[0, 1], [2, 3]]
    for field in pg.present():
        assert pg.ranks(field) == pg.layout.members(field, dist.get_rank())
    # Another order: tensor parallel is outermost.
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    pg = megapg.from_mesh(turned, tp="model", dp="data")
    assert pg.layout is not None
    assert pg.layout.order.startswith("dp-tp")
    # Pipeline stages with context parallelism only: experts then have data parallelism.
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "cp"))
    pg = megapg.from_mesh(stages, pp="pp", cp="cp")
    assert pg.layout is not None
    assert (pg.layout.pp, pg.layout.cp, pg.layout.dp) == (2, 2, 1)
    assert list(pg.layout.partition("pp")) == [(0, 2), (1, 3)]
    # Meshes and names that do not fit.
    assert "tp=2 is not 4" in refused(lambda: megapg.from_mesh(turned, tp="model"))
    refused(lambda: megapg.from_mesh(turned, tp="tp", dp="data"), ForeignGroupError)
    refused(lambda: megapg.from_mesh(turned, tpp="model"), UnknownFieldError)
    assert "not None" in refused(lambda: megapg.from_mesh(None, tp="tp"), ForeignGroupError)
    said = refused(lambda: megapg.from_mesh(turned, tp="model", dp="data", mp="data"))
    assert "mp has the ranks" in said
    dist.barrier()  # a rank must not end while others still connect the groups of a mesh
    dist.destroy_process_group()


def test_a_mesh_as_a_collection() -> None:
    run_distributed(taken_in, world_size=4)
