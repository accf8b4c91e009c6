"""A pipeline of four stages trains on explicit groups; the middle ones have no embedding group."""

from models import train

import megapg

WORLD = 4
LAYOUTS = {"globals": {}, "mine": {"pp": 4}}


def program(pg):
    alone = train(pg)
    with megapg.published(pg):
        assert train(pg) == alone
