"""Experts with expt_tp=1 train on tp=2 with each dispatcher of tokens, inside ``published``."""

from models import train

import megapg

WORLD = 4
LAYOUTS = {"globals": {"tp": 1, "ep": 4}, "mine": {"tp": 2, "ep": 2, "expt_tp": 1}}


def program(pg):
    for dispatcher in ("alltoall", "allgather"):
        with megapg.published(pg):
            losses = train(pg, experts=4, sequence_parallel=True, dispatcher=dispatcher)
        assert len(losses) == 2
