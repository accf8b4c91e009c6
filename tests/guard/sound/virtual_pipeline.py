"""A pipeline of two virtual stages trains inside ``published``; the globals have one stage."""

from layouts import session_and_globals
from models import train

import megapg

WORLD = 2


def program():
    with session_and_globals({"tp": 2}, pp=2, vpp=2) as pg, megapg.published(pg):
        assert len(train(pg, vpp=2, layers=4)) == 2
