"""A model that is small enough to be saved hundreds of times."""

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig


class Layers(MegatronModule):
    """Two layers of Megatron-core, so that two data-parallel ranks write one each."""

    def __init__(self, pg, width=8):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            use_cpu_initialization=True,
            perform_initialization=False,
        )
        super().__init__(config)
        self.pg = pg
        for name in ("first", "second"):
            layer = ColumnParallelLinear(
                8, width, config=config, init_method=torch.nn.init.zeros_, tp_group=pg.tp
            )
            self.add_module(name, layer)

    def fill(self, mark):
        """Fill each element with a value that depends on the mark and not on the layout."""
        with torch.no_grad():
            for parameter in self.parameters():
                start = self.pg.rank("tp") * parameter.numel()
                values = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
                parameter.copy_(values.remainder(1000).view_as(parameter) / 1000 + mark)
        return self

    def mark(self):
        """Return the mark of the :meth:`fill` that wrote all values; None for a mixture."""
        found = float(next(self.parameters()).detach().flatten()[0]) // 1
        mine = [parameter.detach().clone() for parameter in self.parameters()]
        kept = all(
            torch.equal(a, b) for a, b in zip(mine, self.fill(found).parameters(), strict=True)
        )
        return int(found) if kept else None
