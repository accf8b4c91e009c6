"""A conversion sets sizes by ``set_*``, and code of the session reads them as its own."""

from layouts import open_session
from megatron.core import mpu

READER = "columns"
GIVEN = "columns"


def columns(width, pg_collection):
    assert pg_collection.size("tp") == 2
    return width // mpu.get_tensor_model_parallel_world_size()


def program():
    with open_session(tp=2) as session:
        mpu.set_tensor_model_parallel_world_size(1)
        try:
            return columns(8, session.groups)
        finally:
            mpu.set_tensor_model_parallel_world_size(None)


def meant():
    with open_session(tp=2) as session:
        return 8 // session.groups.size("tp")
