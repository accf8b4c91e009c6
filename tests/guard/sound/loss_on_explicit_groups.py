"""A model on explicit groups computes its loss; the cross entropy takes the group in this core."""

import torch
from models import gpt, tokens

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
CORES = ("0.19",)


def program(pg):
    model = gpt(pg)
    alone = model(tokens(), tokens(), None, labels=tokens()).mean()
    alone.backward()
    with megapg.published(pg):
        shown = model(tokens(), tokens(), None, labels=tokens()).mean()
    assert torch.equal(alone, shown)
