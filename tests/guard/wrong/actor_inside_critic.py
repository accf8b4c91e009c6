"""The actor's loss is computed where the critic is published: each rank normalises alone."""

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from models import share

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}
READER = "forward"
GIVEN = "policy_loss"


def policy_loss(logits, labels, pg_collection):
    losses = vocab_parallel_cross_entropy(logits, labels)
    return losses.mean().item() * pg_collection.size("dp")


def program(actor, shown):
    logits, labels = share(actor).unsqueeze(1), torch.tensor([[0], [9], [20], [31]])
    with megapg.published(shown):
        return policy_loss(logits, labels, actor)
