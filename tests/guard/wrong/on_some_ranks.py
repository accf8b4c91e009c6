"""Ranks 1 and 2 have a reward model over the globals' pairs, and take the pairs for its ranks."""

import torch.distributed as dist
from layouts import globals_of, open_session
from megatron.core import mpu

import megapg

WORLD = 4
RANKS = (1, 2)
READER = "neighbours"
GIVEN = "score"


def neighbours():
    return dist.get_process_group_ranks(mpu.get_tensor_model_parallel_group())


def score(pg_collection, shown):
    if shown:
        with megapg.published(pg_collection):
            return neighbours()
    return neighbours()


def run(shown):
    if dist.get_rank() not in RANKS:
        with globals_of(tp=2):
            return []
    with globals_of(tp=2), open_session("reward", tp=2, ranks=RANKS) as session:
        return score(session.groups, shown)


def program():
    return run(shown=False)


def meant():
    return run(shown=True)
