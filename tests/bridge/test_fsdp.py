"""Megatron-core's tensor parallelism and torch's FSDP2 together, on the groups of one session."""

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import megapg
from megapg.testing import megatron_on_cpu, refuse_closed_groups, run_distributed

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(
        not hasattr(DeviceMesh, "_create_flatten_mesh"), reason="this torch's meshes make groups"
    ),
]
STEPS, SAMPLES, WIDTH, HIDDEN = 3, 4, 8, 16


def plain():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH)
    )


class Parallel(torch.nn.Module):
    """The same weights, split over tp."""

    def __init__(self, pg):
        super().__init__()
        config = ModelParallelConfig(tensor_model_parallel_size=pg.size("tp"))
        common = {
            "config": config,
            "init_method": torch.nn.init.zeros_,
            "bias": True,
            "skip_bias_add": False,
            "tp_group": pg.tp,
        }
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False, **common)
        self.down = RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True, **common)
        with torch.no_grad():
            for mine, whole in zip(self.parameters(), part_of(plain(), pg), strict=True):
                mine.copy_(whole)

    def forward(self, values):
        hidden, _ = self.up(values)
        return self.down(torch.nn.functional.gelu(hidden))[0]


def part_of(model, pg):
    """This rank's part of each weight, as Megatron splits them."""
    up, up_bias, down, down_bias = model.parameters()
    size, rank = pg.size("tp"), pg.rank("tp")
    return [
        up.chunk(size)[rank],
        up_bias.chunk(size)[rank],
        down.chunk(size, dim=1)[rank],
        down_bias,
    ]


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

        # The groups are made anew: the meshes follow by themselves, the rest is rebound.
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
