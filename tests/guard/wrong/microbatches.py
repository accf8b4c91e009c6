"""A trainer divides its batch by the globals' dp size, and trains on half of the batch."""

from functools import partial

from megatron.core.parallel_state import get_data_parallel_world_size

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "microbatches_of"
GIVEN = "train"


def microbatches_of(batch, micro):
    return batch // (micro * get_data_parallel_world_size())


count_of = partial(microbatches_of, 16)


def train(pg_collection, count=count_of):
    return [count(micro=2), pg_collection.size("tp")]


def program(pg):
    return train(pg)
