"""A migration compares a session with the globals, and asks for the globals by name."""

from layouts import session_and_globals

import megapg
from megapg.megatron import compare_with_globals

WORLD = 2


def width(pg_collection):
    return pg_collection.size("tp")


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        legacy = megapg.from_parallel_state()
        with compare_with_globals() as comparison:
            assert (width(legacy), width(pg)) == (1, 2)
        assert comparison.disagreements
