"""Two scripts that know no collection take turns; each runs where its session is published."""

from models import train

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def program(*both):
    losses = []
    for pg in both:
        with megapg.published(pg):
            losses.append(train(pg, passed=False))
    assert losses[0] != losses[1]
