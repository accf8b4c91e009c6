"""Megatron-core's tensor parallelism with torch's FSDP2, on the groups of one session."""

import pytest
import torch
from tensor_parallel_mlp import WIDTH, Parallel, part_of, plain
from torch.distributed.fsdp import fully_shard

import megapg
from megapg.testing import megatron_on_cpu, refuse_closed_groups, run_distributed
from megapg.torch_private.meshes import can_mesh

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(not can_mesh(), reason="meshes take torch 2.13"),
]
STEPS, SAMPLES = 3, 4


def train(model, replica=0, replicas=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        values = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
        model(values.chunk(replicas)[replica]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def together():
    with megatron_on_cpu(), megapg.session(tp=2) as session:
        pg = session.groups
        megapg.seed_all(1, pg)
        replica, replicas = pg.rank("dp_cp"), pg.size("dp_cp")
        model = Parallel(pg)
        fully_shard(model, mesh=pg.mesh("dp_cp"))
        whole = train(plain())
        assert_equal(train(model, replica, replicas), part_of(whole, pg))

        # The groups are made again: the meshes follow, and rebind() updates the rest.
        session.suspend("recreate")
        session.resume()
        report = session.rebind(model)
        assert not report.left, str(report)
        assert model.up.tp_group is session.groups.tp
        with refuse_closed_groups():
            trained = train(model, replica, replicas)
        assert_equal(trained, part_of(train(whole), session.groups))


def assert_equal(model, parts):
    for mine, expected in zip(model.parameters(), parts, strict=True):
        torch.testing.assert_close(mine.full_tensor(), expected)


def test_tensor_parallel_layers_under_fsdp_equal_plain_training():
    run_distributed(together, 4, deadline=120)
