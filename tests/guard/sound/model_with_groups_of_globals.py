"""A legacy model is built where global reads are allowed; its later reads agree with its groups."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from models import LENGTH, VOCABULARY, config, tokens

import megapg

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}


def program(pg):
    with megapg.allow_global_reads():
        small = config(pg, tensor_model_parallel_size=2)
        model = GPTModel(small, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    loss = model(tokens(), tokens(), None, labels=tokens()).mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert model.pg_collection.tp.size() == 2
