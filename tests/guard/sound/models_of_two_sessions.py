"""Two models compute on the explicit groups of their sessions; nothing initialises the globals."""

import torch
from layouts import two_sessions
from models import gpt, tokens

import megapg

WORLD = 2


def logits(pg):
    torch.manual_seed(3)
    return gpt(pg).eval()(tokens(), tokens(), None)


def program():
    with two_sessions({"tp": 2}, {}) as both, torch.no_grad():
        for pg in both:
            alone = logits(pg)
            with megapg.published(pg):
                assert torch.equal(logits(pg), alone)
