"""A decorator lets only the first dp rank of the globals save: one of two shards is not saved."""

import functools

from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "wrapper"
GIVEN = "wrapper"


def on_first_replica(function):
    @functools.wraps(function)
    def wrapper(*args, pg_collection):
        if mpu.get_data_parallel_rank() == 0:
            return function(*args, pg_collection=pg_collection)
        return "nothing"

    return wrapper


@on_first_replica
def save(name, *, pg_collection):
    return f"{name}_{pg_collection.rank('tp')}"


def program(pg):
    return save("shard", pg_collection=pg)
