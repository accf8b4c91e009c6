"""An MoE layer that is built without the collection keeps all experts on each rank (ep=1)."""

from layouts import session_and_globals
from models import moe_layer

WORLD = 2
READER = "get_default_pg_collection"
GIVEN = "moe_layer"


def local_experts(pg, **collection):
    return moe_layer(pg, **collection).local_expert_indices


def program():
    with session_and_globals({"ep": 1}, ep=2) as pg:
        return local_experts(pg)


def meant():
    with session_and_globals({"ep": 1}, ep=2) as pg:
        return local_experts(pg, pg_collection=pg)
