"""After the session has closed, the globals are the only layout and answer any code."""

from layouts import globals_of, open_session
from megatron.core import mpu


def ranks(pg_collection, size):
    assert pg_collection is not None
    return mpu.get_data_parallel_world_size() == size


def program():
    with globals_of():
        with open_session(tp=2) as session:
            pg = session.groups
        assert ranks(pg, 2)
