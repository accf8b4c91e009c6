"""A model asks its collection, and the net that it makes asks the globals (as in cosmos)."""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from models import config

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "__init__"
GIVEN = "__init__"


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mine = width // parallel_state.get_tensor_model_parallel_world_size()


class Model(torch.nn.Module):
    def __init__(self, pg_collection):
        super().__init__()
        self.pg_collection = pg_collection
        self.net = Net(8)
        self.head = ColumnParallelLinear(
            4,
            8,
            config=config(pg_collection),
            init_method=torch.nn.init.ones_,
            tp_group=pg_collection.tp,
        )


def program(pg):
    model = Model(pg)
    return [model.net.mine, model.head.weight.shape[0]]
