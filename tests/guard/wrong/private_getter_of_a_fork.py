"""A fork's own getter reads a private global of ``parallel_state``."""

from megapg.megatron import parallel_state

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "get_tensor_rank"
GIVEN = "rows_of"


def get_tensor_rank():
    return parallel_state._TENSOR_MODEL_PARALLEL_GROUP.rank()


def rows_of(pg_collection, rows):
    each = rows // pg_collection.size("tp")
    return list(range(get_tensor_rank() * each, (get_tensor_rank() + 1) * each))


def program(pg):
    return rows_of(pg, 8)
