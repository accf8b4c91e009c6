"""A private global is read out of ``vars(parallel_state)``, which no hook sees."""

from megapg.megatron import parallel_state

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def columns(width, pg_collection):
    assert pg_collection.size("tp") == 2
    return width // vars(parallel_state)["_TENSOR_MODEL_PARALLEL_GROUP"].size()


def program(pg):
    return columns(8, pg)


def meant(pg):
    return 8 // pg.size("tp")
