"""A pipeline of four stages trains on explicit groups; the middle ones have no embedding group."""

from layouts import session_and_globals
from models import train

import megapg

WORLD = 4


def program():
    with session_and_globals({}, pp=4) as pg:
        alone = train(pg)
        with megapg.published(pg):
            assert train(pg) == alone
