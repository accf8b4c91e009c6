"""A property of a data set asks the globals each time, inside the loop that has the groups."""

from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 2
READER = "shard"
GIVEN = "read"


class Data:
    rows = (10, 11, 12, 13)

    @property
    def shard(self):
        return self.rows[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def batches(data, pg_collection):
    def read():
        return list(data.shard)[: 4 // pg_collection.size("tp")]

    yield read()


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return next(batches(Data(), pg))


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.published(pg):
        return next(batches(Data(), pg))
