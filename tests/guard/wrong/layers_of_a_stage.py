"""A pipeline stage builds the layers of stage 0: the helper asks the globals for the pp rank."""

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from models import config

LAYOUTS = {"globals": {"pp": 1}, "mine": {"pp": 2}}
READER = "get_num_layers_to_build"


def program(pg_collection):
    stage = config(pg_collection, num_layers=3, num_layers_in_first_pipeline_stage=1)
    return get_num_layers_to_build(stage)
