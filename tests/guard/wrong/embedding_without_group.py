"""A reward model builds its embedding without the group: each rank makes the whole table."""

import torch
from layouts import session_and_globals
from megatron.core.tensor_parallel import VocabParallelEmbedding
from models import VOCABULARY, config

WORLD = 2
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "__init__"


class RewardModel(torch.nn.Module):
    def __init__(self, pg_collection, **group):
        super().__init__()
        self.words = VocabParallelEmbedding(
            VOCABULARY,
            16,
            init_method=torch.nn.init.ones_,
            config=config(pg_collection),
            **group,
        )


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return list(RewardModel(pg).words.weight.shape)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return list(RewardModel(pg, tp_group=pg.tp).words.weight.shape)
