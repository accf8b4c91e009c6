"""A multi-token prediction layer splits what it recomputes over the globals (#7452, finding 4)."""

import torch
from layouts import session_and_globals
from megatron.core import tensor_parallel
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from models import config

import megapg

WORLD = 2
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "gradient"
CORES = ("0.16",)


def gradient(pg_collection):
    layer = MultiTokenPredictionLayer.__new__(MultiTokenPredictionLayer)
    torch.nn.Module.__init__(layer)  # without its transformer layer
    layer.config = config(
        pg_collection,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    layer.config.distribute_saved_activations = True
    weight = torch.ones((), requires_grad=True)
    hidden = torch.full((4,), 1.0 + pg_collection.rank("dp"), requires_grad=True)
    layer._checkpointed_forward(lambda given: given * weight, hidden).sum().backward()
    assert tensor_parallel.random is not None
    return weight.grad.item()


def program():
    with session_and_globals({"tp": 2}) as pg:
        return gradient(pg)


def meant():
    with session_and_globals({"tp": 2}) as pg, megapg.published(pg):
        return gradient(pg)
