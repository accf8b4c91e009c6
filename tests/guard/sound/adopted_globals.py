"""``adopt()`` owns the groups of the globals, and old code trains on them as before."""

from layouts import globals_of
from models import TEXT, TINY

from megapg.megatron import adopt
from megapg.tools.demo import gpt as demo

AMBIGUOUS = False


def program():
    with globals_of(), adopt():
        assert len(demo.train(TINY, TEXT, None).losses) == 2
