"""Megatron-core copies weights from a trainer's layout to a rollout's, outside of any block."""

import torch
from megatron.core.resharding.refit import swap_model_weights
from models import gpt

from megapg.megatron import for_resharding

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def program(train, rollout):
    torch.manual_seed(7)
    trained, served = gpt(train, num_layers=2), gpt(rollout, num_layers=2)
    swap_model_weights(for_resharding(trained), for_resharding(served), "nccl")
    mine = dict(served.named_parameters())
    norm = "decoder.final_layernorm.weight"
    assert norm not in mine or torch.equal(mine[norm], dict(trained.named_parameters())[norm])
