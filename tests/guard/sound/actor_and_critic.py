"""An actor on tp=2 and a critic on pp=2 take turns; each trains where it is published."""

from layouts import two_sessions
from models import run_of
from stepwise import build, step, weights

import megapg

WORLD = 2


def program():
    with two_sessions({"tp": 2}, {"pp": 2}) as both:
        jobs = []
        for pg in both:
            with megapg.published(pg):
                jobs.append(build(run_of(pg), pg))
        losses = [
            step(run_of(pg), number, job, pg)
            for number in range(2)
            for pg, job in zip(both, jobs, strict=True)
        ]
        for pg, job in zip(both, jobs, strict=True):
            weights(job, pg)
        assert len(set(losses)) == 4
