"""A GPT on tp=2 whose cross entropy normalises over half of the vocabulary (the README's table)."""

from layouts import session_and_globals
from models import gpt, tokens

import megapg

WORLD = 2
READER = "forward"
GIVEN = "compute_language_model_loss"
CORES = ("0.16", "0.17", "0.18")


def first_loss(pg):
    words = tokens()
    return gpt(pg)(words, words, None, labels=words).mean().item()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return first_loss(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.published(pg):
        return first_loss(pg)
