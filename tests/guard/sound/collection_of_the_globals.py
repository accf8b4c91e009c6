"""A migration compares a session with the globals, and asks for the globals by name."""

import megapg
from megapg.megatron import compare_with_globals

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def width(pg_collection):
    return pg_collection.size("tp")


def program(pg):
    legacy = megapg.from_parallel_state()
    with compare_with_globals() as comparison:
        assert (width(legacy), width(pg)) == (1, 2)
    assert comparison.disagreements
