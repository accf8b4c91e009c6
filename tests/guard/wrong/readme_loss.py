"""A GPT on tp=2 whose cross entropy normalises over half of the vocabulary (the README's table)."""

from models import gpt, tokens

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "forward"
GIVEN = "compute_language_model_loss"
CORES = ("0.16", "0.17", "0.18")


def program(pg):
    words = tokens()
    return gpt(pg)(words, words, None, labels=words).mean().item()
