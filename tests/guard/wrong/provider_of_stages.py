"""A model provider that is handed on asks the globals which stage it builds (as in NeMo RL)."""

import functools

from megatron.core import mpu

LAYOUTS = {"globals": {"pp": 1}, "mine": {"pp": 2}}
READER = "provide"
GIVEN = "get_model"


def provide(parts, tied):
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    return [part for part, there in zip(parts, (first, last or tied), strict=True) if there]


def get_model(provider, pg_collection):
    return [*provider(tied=False), f"stage {pg_collection.rank('pp')}"]


def program(pg):
    return get_model(functools.partial(provide, ["embedding", "head"]), pg)
