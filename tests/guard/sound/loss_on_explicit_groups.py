"""A model on explicit groups computes its loss; the cross entropy takes the group in this core."""

import torch
from layouts import session_and_globals
from models import gpt, tokens

import megapg

WORLD = 2
CORES = ("0.19",)


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        model = gpt(pg)
        alone = model(tokens(), tokens(), None, labels=tokens()).mean()
        alone.backward()
        with megapg.published(pg):
            shown = model(tokens(), tokens(), None, labels=tokens()).mean()
        assert torch.equal(alone, shown)
