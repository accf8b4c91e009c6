"""Experts on ep=2 compute logits with explicit groups, without a block."""

import torch
from layouts import session_and_globals
from models import gpt, tokens

import megapg

WORLD = 2


def program():
    with session_and_globals({"ep": 1}, ep=2) as pg, torch.no_grad():
        model = gpt(pg, experts=2, add_bias_linear=False).eval()
        alone = model(tokens(), tokens(), None)
        with megapg.published(pg):
            assert torch.equal(alone, model(tokens(), tokens(), None))
