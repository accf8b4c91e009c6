"""Two linear layers, from torch and as Megatron-core shards them over tp."""

import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

WIDTH, HIDDEN = 8, 16


def plain():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, WIDTH)
    )


def linears(pg, config, width, hidden):
    """Return both layers, without weights."""
    common = {
        "config": config,
        "init_method": torch.nn.init.zeros_,
        "bias": True,
        "skip_bias_add": False,
        "tp_group": pg.tp,
    }
    return (
        ColumnParallelLinear(width, hidden, gather_output=False, **common),
        RowParallelLinear(hidden, width, input_is_parallel=True, **common),
    )


class Parallel(torch.nn.Module):
    """The weights of :func:`plain`, sharded over tp."""

    def __init__(self, pg, config=None):
        super().__init__()
        config = config or ModelParallelConfig(tensor_model_parallel_size=pg.size("tp"))
        self.up, self.down = linears(pg, config, WIDTH, HIDDEN)
        with torch.no_grad():
            for mine, whole in zip(self.parameters(), part_of(plain(), pg), strict=True):
                mine.copy_(whole)

    def forward(self, values):
        hidden, _ = self.up(values)
        return self.down(torch.nn.functional.gelu(hidden))[0]


def part_of(model, pg):
    """Return this rank's shard of each weight, as Megatron shards them."""
    up, up_bias, down, down_bias = model.parameters()
    size, rank = pg.size("tp"), pg.rank("tp")
    return up.chunk(size)[rank], up_bias.chunk(size)[rank], down.chunk(size, 1)[rank], down_bias
