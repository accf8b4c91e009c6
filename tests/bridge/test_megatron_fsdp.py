"""Megatron-FSDP on a session's groups: the ranks of its meshes, and training."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import mcore_fsdp_adapter as upstreams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from tensor_parallel_mlp import WIDTH, Parallel, plain

import megapg
from megapg import torch_private
from megapg.errors import LayoutError, NoCollectionError, StaleGroupError, UnsupportedOptionError
from megapg.megatron import forbid_global_reads, fsdp_adapter, fsdp_index, published, to_megatron
from megapg.testing import megatron_on_cpu, run_distributed
from megapg.torch_private.meshes import can_mesh

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(not can_mesh(), reason="meshes take torch 2.13"),
    pytest.mark.skipif(not upstreams.HAVE_EINOPS, reason="Megatron-FSDP needs einops"),
]
TAKES = upstreams.FSDPDistributedIndex.__init__.__code__.co_varnames
EXPERTS_HAVE_INSTANCES = "hybrid_fsdp_expt_group" in TAKES
# Upstream's constructors read from the globals what they do not take as arguments.
READ_BY_UPSTREAM = [] if "fsdp_group_ag" in TAKES else ["megatron.core.distributed.fsdp"]
# Without Transformer Engine, the adapter of 0.16 allows no tensor parallelism.
TP = 2 if isinstance(getattr(upstreams, "TELinear", torch.nn.Linear), type) else 1

# -- ranks -----------------------------------------------------------------------------------------

IN_ORDER = [
    {"tp": 2},
    {"tp": 2, "cp": 2, "ep": 2},
    {"tp": 2, "ep": 2, "expt_tp": 1},
    {"ep": 4},
    {"tp": 2, "optimizer_instances": 2},
    {"tp": 2, "ep": 2, "expt_tp": 1, "optimizer_instances": 2},
]
"""What upstream numbers as megapg does."""


def config_of(instances=1, **more):
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        num_distributed_optimizer_instances=instances,
        gradient_reduce_div_fusion=False,  # gloo has no such reduction
        **more,
    )


def upstreams_index(pg, config):
    """Call the adapter's code of ``__init__``, which tells groups apart by size."""
    adapter = SimpleNamespace(ddp_config=config, num_moe_experts=4)
    return upstreams.FullyShardedDataParallel._init_dist_index(adapter, pg)


def shape_of(mesh):
    groups = [mesh.get_group(name) for name in mesh.mesh_dim_names]
    return tuple(map(str, mesh.mesh_dim_names)), mesh.mesh.tolist(), groups


def in_upstreams_order():
    with megatron_on_cpu():
        dist.init_process_group("gloo")
        for sizes in IN_ORDER:
            with megapg.session(**sizes, all_gather_groups=True) as session:
                pg, instances = session.groups, sizes.get("optimizer_instances", 1)
                config, before = config_of(instances), torch_private.known_groups()
                if instances > 1 and "ep" in sizes and not EXPERTS_HAVE_INSTANCES:
                    with pytest.raises(UnsupportedOptionError, match="install Megatron-core"):
                        fsdp_index(pg, config)
                    continue
                with forbid_global_reads(allow=READ_BY_UPSTREAM):
                    ours = fsdp_index(pg, config)
                theirs = upstreams_index(pg, config)
                assert torch_private.known_groups() == before
                assert shape_of(ours.device_mesh) == shape_of(theirs.device_mesh), sizes
                assert shape_of(ours.expt_device_mesh) == shape_of(theirs.expt_device_mesh), sizes
                for key, mesh in theirs.mesh_library.items():
                    assert shape_of(ours.mesh_library[key]) == shape_of(mesh), (sizes, key)
                assert ours.mesh_library.keys() == theirs.mesh_library.keys()
                for of_experts in (False, True):
                    for get in ("get_dp_group", "get_fsdp_group"):
                        found, expected = (
                            getattr(each, get)(of_experts) for each in (ours, theirs)
                        )
                        assert found is expected, (sizes, get)
                assert ours.get_outer_fsdp_group() is theirs.get_outer_fsdp_group()
                twin = ours.get_fsdp_group(independent_all_gather=True)
                assert twin is (pg.dp_cp_ag if instances == 1 else None)
        elsewhere()


def elsewhere():
    """Compare layouts that upstream numbers wrongly: other orders, parts of WORLD, stages."""
    me = dist.get_rank()
    half = [me % 2 + 2 * each for each in (3, 1, 0, 2)]
    for number, sizes in enumerate(
        (
            {"tp": 2, "order": "dp-tp-cp-ep-pp"},
            {"tp": 2, "ep": 2, "expt_tp": 1, "pp": 2},
            {"tp": 2, "ranks": half},
            {"tp": 2, "ranks": range(7, -1, -1)},
        )
    ):
        part = f"{number} of {me % 2}" if sizes.get("ranks") is half else f"{number}"
        with megapg.session(**sizes, name=part) as session:
            pg = session.groups
            index = fsdp_index(pg, config_of())
            follows(index.device_mesh, pg, "dp_cp", "tp")
            follows(index.expt_device_mesh, pg, "expt_dp", "expt_tp")
            assert fsdp_index(pg, config_of()).device_mesh is index.device_mesh
            if number < 3:
                with pytest.raises((AssertionError, upstreams.einops.EinopsError)):
                    upstreams_index(pg, config_of())
            else:  # upstream compares sorted ranks
                wrong = upstreams_index(pg, config_of()).device_mesh.mesh.tolist()
                assert wrong == torch.arange(8).view(4, 2).tolist()
                assert index.device_mesh.mesh.flatten().tolist() == list(range(7, -1, -1))
            with pytest.raises(LayoutError, match="num_distributed_optimizer_instances=2 in the"):
                fsdp_index(pg, config_of(2))
    with pytest.raises(StaleGroupError):
        fsdp_index(pg, config_of())
    refused = pytest.raises(UnsupportedOptionError, match="gtp_remat and expt_gtp_remat shard")
    with megapg.session(gtp_remat=2) as session, refused:
        fsdp_index(session.groups, config_of())
    with megapg.session(tp=2, ep=2) as session:
        model = torch.nn.Module()
        model.index = fsdp_index(session.groups, config_of())
        session.suspend("recreate")
        session.resume()
        assert not session.rebind(model).left
        follows(model.index.device_mesh, session.groups, "dp_cp", "tp")
        assert model.index.get_fsdp_group() is session.groups.dp_cp
        assert model.index.get_fsdp_group(is_expert_parallel=True) is session.groups.expt_dp


def follows(mesh, pg, inner, tp):
    assert mesh.get_group("dp_cp") is getattr(pg, inner)
    assert mesh.get_group("tp") is getattr(pg, tp)
    for row in mesh.mesh.tolist():
        assert row == list(pg.layout.members(tp, row[0]))
    for column in mesh.mesh.t().tolist():
        assert column == list(pg.layout.members(inner, column[0]))


def test_meshes_are_upstreams_and_those_of_the_layout_where_upstream_has_none():
    run_distributed(in_upstreams_order, 8, deadline=200)


# -- training --------------------------------------------------------------------------------------

STEPS, SAMPLES = 3, 8


def batch(step):
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def losses_of(model, group=None, finish=lambda: None, begin=lambda: None, install=lambda: None):
    """Return the loss of the whole batch at each step; train on this rank's part of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica, replicas = (group.rank(), group.size()) if group else (0, 1)
    losses = []
    for step in range(STEPS):
        begin()
        optimizer.zero_grad()
        loss = model(batch(step).chunk(replicas)[replica]).square().mean()
        loss.backward()
        finish()
        optimizer.step()
        install()
        losses.append(loss.detach())
    told = torch.stack(losses)
    if group:
        dist.all_reduce(told, group=group)
    return told / replicas


def trained():
    with megatron_on_cpu():
        for sizes in ({"tp": TP}, {"optimizer_instances": 2}):
            with megapg.session(**sizes, ranks=[3, 0, 2, 1]) as session:
                trains_as_plain(session.groups)


def trains_as_plain(pg):
    expected = losses_of(plain())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=pg.size("tp"),
    )
    ddp_config = config_of(
        1 if pg.inter_dist_opt is None else pg.size("inter_dist_opt"),
        data_parallel_sharding_strategy="optim_grads_params",
    )
    megapg.seed_all(1, pg)
    whole = Parallel(pg, config)
    with published(pg), forbid_global_reads(allow=READ_BY_UPSTREAM):
        model = fsdp_adapter()(
            config,
            ddp_config,
            whole,
            fsdp_unit_modules=[ColumnParallelLinear, RowParallelLinear],
            pg_collection=pg,
        )
    assert isinstance(model, upstreams.FullyShardedDataParallel)
    assert model.megatron_fsdp_dist_index.get_dp_group() is pg.dp_cp
    assert {type(each.data).__name__ for each in model.parameters()} == {"DTensor"}
    model.module.is_last_microbatch = True  # as a schedule's no_sync() leaves it
    found = losses_of(
        model,
        pg.dp_cp,
        begin=model.zero_grad_buffer,
        finish=model.finish_grad_sync,
        install=model.module.install_optimized_model_weights,
    )
    torch.testing.assert_close(found, expected)
    assert len(set(found.tolist())) == STEPS
    with pytest.raises(NoCollectionError, match="pass the groups of a session"):
        fsdp_adapter()(config, ddp_config, plain(), pg_collection=to_megatron(pg))


def test_training_on_ranks_in_another_order_equals_plain_training():
    run_distributed(trained, 4, deadline=120)
