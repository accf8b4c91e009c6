"""Two scripts that know no collection take turns; each runs where its session is published."""

from layouts import two_sessions
from models import train

import megapg

WORLD = 2


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as both:
        losses = []
        for pg in both:
            with megapg.published(pg):
                losses.append(train(pg, passed=False))
        assert losses[0] != losses[1]
