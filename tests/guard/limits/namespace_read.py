"""A private global is read out of ``vars(parallel_state)``, which no hook sees."""

from layouts import session_and_globals

from megapg.megatron import parallel_state

WORLD = 2


def columns(width, pg_collection):
    assert pg_collection.size("tp") == 2
    return width // vars(parallel_state)["_TENSOR_MODEL_PARALLEL_GROUP"].size()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return columns(8, pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return 8 // pg.size("tp")
