"""The router's bias counts the tokens of one rank: the globals' tp x dp group has one rank."""

import torch
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

LAYOUTS = {"globals": {"pp": 2}, "mine": {}}
READER = "get_updated_expert_bias"
GIVEN = "update_router"


def update_router(bias, counts, pg_collection):
    assert pg_collection.size("tp_dp_cp") == 2
    return get_updated_expert_bias(counts.clone(), bias, 0.5).tolist()


def program(pg):
    return update_router(torch.zeros(2), torch.tensor([[0.0, 4.0], [6.0, 0.0]])[pg.rank("dp")], pg)
