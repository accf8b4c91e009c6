"""A trainer keeps the view of the globals that ``resolve()`` gave it, and is given groups later."""

import warnings

from layouts import session_and_globals

import megapg

WORLD = 2
READER = "columns"
GIVEN = "columns"


class Trainer:
    def __init__(self, groups):
        self.groups = groups

    def columns(self, width, pg):
        return width // self.groups.size("tp") + pg.size("dp")


def trainer(**passed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(megapg.resolve(**passed))


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return trainer(pg_collection=None).columns(8, pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return trainer(pg_collection=pg).columns(8, pg)
