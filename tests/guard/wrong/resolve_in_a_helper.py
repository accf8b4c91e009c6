"""A migrated helper resolves its collection, and its caller does not pass the one that it has."""

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "vocabulary_start"


def vocabulary_start(each, *, pg_collection=None):
    pg = megapg.resolve(pg_collection, needs=("tp",))
    return each * pg.rank("tp")


def program(pg):
    return vocabulary_start(16)
