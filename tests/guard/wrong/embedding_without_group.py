"""A reward model builds its embedding without the group: each rank makes the whole table."""

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from models import VOCABULARY, config

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "__init__"


class RewardModel(torch.nn.Module):
    def __init__(self, pg_collection):
        super().__init__()
        self.words = VocabParallelEmbedding(
            VOCABULARY,
            16,
            init_method=torch.nn.init.ones_,
            config=config(pg_collection),
        )


def program(pg):
    return list(RewardModel(pg).words.weight.shape)
