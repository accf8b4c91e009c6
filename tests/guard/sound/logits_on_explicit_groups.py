"""A model on explicit groups computes logits; no read of the globals changes a number there."""

import torch
from models import gpt, tokens

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def program(pg):
    model = gpt(pg).eval()
    with torch.no_grad():
        alone = model(tokens(), tokens(), None)
        with megapg.published(pg):
            shown = model(tokens(), tokens(), None)
    assert torch.equal(alone, shown)
