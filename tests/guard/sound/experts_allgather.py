"""Experts with expt_tp=1 train on tp=2 with the dispatcher allgather, inside ``published``."""

from layouts import session_and_globals
from models import train

import megapg

WORLD = 4


def program():
    with session_and_globals({"tp": 1, "ep": 4}, tp=2, ep=2, expt_tp=1) as pg:
        with megapg.published(pg):
            losses = train(pg, experts=4, sequence_parallel=True, dispatcher="allgather")
        assert len(losses) == 2
