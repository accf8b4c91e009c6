"""A backward pass recomputes every layer inside ``published``, over globals of another layout."""

from layouts import session_and_globals
from models import train

import megapg

WORLD = 2


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.published(pg):
        losses = train(pg, recompute=True, sequence_parallel=True)
        assert losses == train(pg, recompute=False, sequence_parallel=True)
