"""A pipeline of two virtual stages trains inside ``published``; the globals have one stage."""

from models import train

import megapg

LAYOUTS = {"globals": {"tp": 2}, "mine": {"pp": 2, "vpp": 2}}


def program(pg):
    with megapg.published(pg):
        assert len(train(pg, vpp=2, layers=4)) == 2
