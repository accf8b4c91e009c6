"""A pipeline stage builds the layers of stage 0: the helper asks the globals for the pp rank."""

from layouts import session_and_globals
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from models import config

WORLD = 2
READER = "get_num_layers_to_build"
GIVEN = "build_stage"


def build_stage(pg_collection, **rank):
    stage = config(pg_collection, num_layers=3, num_layers_in_first_pipeline_stage=1)
    return get_num_layers_to_build(stage, **rank)


def program():
    with session_and_globals({"pp": 1}, pp=2) as pg:
        return build_stage(pg)


def meant():
    with session_and_globals({"pp": 1}, pp=2) as pg:
        return build_stage(pg, pp_rank=pg.rank("pp"))
