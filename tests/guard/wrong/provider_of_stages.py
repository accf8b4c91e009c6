"""A model provider that is handed on asks the globals which stage it builds (as in NeMo RL)."""

import functools

from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 2
READER = "provide"
GIVEN = "get_model"


def provide(parts, tied):
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    return [part for part, there in zip(parts, (first, last or tied), strict=True) if there]


def get_model(provider, pg_collection):
    return [*provider(tied=False), f"stage {pg_collection.rank('pp')}"]


def program():
    with session_and_globals({"pp": 1}, pp=2) as pg:
        return get_model(functools.partial(provide, ["embedding", "head"]), pg)


def meant():
    with session_and_globals({"pp": 1}, pp=2) as pg, megapg.published(pg):
        return get_model(functools.partial(provide, ["embedding", "head"]), pg)
