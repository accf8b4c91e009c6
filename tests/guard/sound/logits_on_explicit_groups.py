"""A model on explicit groups computes logits; no read of the globals changes a number there."""

import torch
from layouts import session_and_globals
from models import gpt, tokens

import megapg

WORLD = 2


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        model = gpt(pg).eval()
        with torch.no_grad():
            alone = model(tokens(), tokens(), None)
            with megapg.published(pg):
                shown = model(tokens(), tokens(), None)
        assert torch.equal(alone, shown)
