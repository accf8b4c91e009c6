"""An actor on tp=2 and a critic on pp=2 take turns; each trains where it is published."""

from models import run_of
from stepwise import build, step, weights

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {"pp": 2}}


def program(*both):
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
