"""The router's bias counts the tokens of one rank: the globals' tp x dp group has one rank."""

import torch
from layouts import session_and_globals
from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

import megapg

WORLD = 2
READER = "get_updated_expert_bias"
GIVEN = "update_router"


def update_router(bias, counts, pg_collection):
    assert pg_collection.size("tp_dp_cp") == 2
    return get_updated_expert_bias(counts.clone(), bias, 0.5).tolist()


def program():
    with session_and_globals({"pp": 2}) as pg:
        return update_router(
            torch.zeros(2), torch.tensor([[0.0, 4.0], [6.0, 0.0]])[pg.rank("dp")], pg
        )


def meant():
    with session_and_globals({"pp": 2}) as pg, megapg.published(pg):
        return update_router(
            torch.zeros(2), torch.tensor([[0.0, 4.0], [6.0, 0.0]])[pg.rank("dp")], pg
        )
