"""The actor's loss is computed where the critic is published: each rank normalises alone."""

import torch
from layouts import two_sessions
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from models import share

import megapg

WORLD = 2
READER = "forward"
GIVEN = "policy_loss"


def policy_loss(logits, labels, pg_collection):
    losses = vocab_parallel_cross_entropy(logits, labels)
    return losses.mean().item() * pg_collection.size("dp")


def update(actor, critic, shown):
    logits, labels = share(actor).unsqueeze(1), torch.tensor([[0], [9], [20], [31]])
    with megapg.published(shown):
        return policy_loss(logits, labels, actor)


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return update(actor, critic, critic)


def meant():
    with two_sessions({"tp": 2}, {"pp": 2}) as (actor, critic):
        return update(actor, critic, actor)
