"""A layer that is built without the collection takes all groups of the globals as its own."""

from layouts import session_and_globals
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from models import config

WORLD = 2
READER = "use_mpu_process_groups"
GIVEN = "shapes"


def shapes(pg, **collection):
    layer = build_module(get_gpt_layer_local_spec(), config=config(pg), **collection)
    return list(layer.mlp.linear_fc1.weight.shape)


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return shapes(pg)


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return shapes(pg, pg_collection=pg)
