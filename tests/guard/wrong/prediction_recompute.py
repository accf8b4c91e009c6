"""A multi-token prediction layer splits what it recomputes over the globals (#7452, finding 4)."""

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from models import config

from megapg.megatron import core_version

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}
READER = "get_tensor_model_parallel_group_if_none"
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


class Layer(MultiTokenPredictionLayer):
    def __init__(self, pg):
        torch.nn.Module.__init__(self)  # without a transformer layer
        self.config = config(pg, **RECOMPUTE)
        self.config.distribute_saved_activations = True
        self.scale = torch.nn.Parameter(torch.ones(()))

    def _proj_and_transformer_layer(self, hidden_states, decoder_input=None, **_):
        return hidden_states * self.scale


def program(pg_collection):
    layer = Layer(pg_collection)
    hidden = torch.full((4,), 1.0 + pg_collection.rank("dp"), requires_grad=True)
    first = (
        (hidden, None) if core_version() >= (0, 18) else (layer._proj_and_transformer_layer, hidden)
    )
    layer._checkpointed_forward(*first).sum().backward()
    return layer.scale.grad.item()
