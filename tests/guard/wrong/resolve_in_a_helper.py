"""A migrated helper resolves its collection, and its caller does not pass the one that it has."""

from layouts import session_and_globals

import megapg

WORLD = 2
READER = "vocabulary_start"
GIVEN = "first_token"


def vocabulary_start(each, *, pg_collection=None):
    pg = megapg.resolve(pg_collection, needs=("tp",))
    return each * pg.rank("tp")


def first_token(pg, **passed):
    return vocabulary_start(16, **passed)


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return first_token(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return first_token(pg, pg_collection=pg)
