"""A module without ``tp_group`` writes each shard as the whole tensor into a checkpoint."""

import torch
from megatron.core.transformer import MegatronModule
from models import config

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "sharded_state_dict"
GIVEN = "describe"


class Head(MegatronModule):
    def __init__(self, pg):
        super().__init__(config=config(pg))
        self.bias = torch.nn.Parameter(torch.zeros(3))


def describe(model, pg_collection):
    shard = model.sharded_state_dict(metadata={"dp_cp_group": pg_collection.dp_cp})["bias"]
    return list(shard.replica_id)


def program(pg):
    return describe(Head(pg), pg)
