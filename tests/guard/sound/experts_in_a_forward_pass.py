"""Experts on ep=2 compute logits with explicit groups, without a block."""

import torch
from models import gpt, tokens

import megapg

LAYOUTS = {"globals": {"ep": 1}, "mine": {"ep": 2}}


def program(pg):
    with torch.no_grad():
        model = gpt(pg, experts=2, add_bias_linear=False).eval()
        alone = model(tokens(), tokens(), None)
        with megapg.published(pg):
            assert torch.equal(alone, model(tokens(), tokens(), None))
