"""A backward pass recomputes every layer inside ``published``, over globals of another layout."""

from models import train

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def program(pg):
    with megapg.published(pg):
        losses = train(pg, recompute=True, sequence_parallel=True)
        assert losses == train(pg, recompute=False, sequence_parallel=True)
