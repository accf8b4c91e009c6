"""A getter of megapg gets the view of the globals, and answers their first rank."""

from layouts import session_and_globals

import megapg
from megapg.megatron import getters

WORLD = 2
READER = "source_rank"
GIVEN = "source_rank"


def source_rank(pg, passed):
    return [getters.tensor_src_rank(megapg.resolve(passed)), pg.size("dp")]


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return source_rank(pg, None)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return source_rank(pg, pg)
