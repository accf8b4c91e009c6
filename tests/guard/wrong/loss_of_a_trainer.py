"""A trainer's loss takes the tp group, and Megatron-core's cross entropy has no such argument."""

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from models import share

LAYOUTS = {"mine": {"tp": 2}, "globals": {"tp": 1}}
READER = "forward"
GIVEN = "masked_loss"


def masked_loss(logits, labels, tp_group):
    assert tp_group.size() == 2
    return vocab_parallel_cross_entropy(logits, labels).mean().item()


def program(pg):
    return masked_loss(share(pg).unsqueeze(1), torch.tensor([[0], [9], [20], [31]]), pg.tp)
