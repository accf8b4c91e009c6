"""An MoE layer that is built without the collection keeps all experts on each rank (ep=1)."""

from models import moe_layer

LAYOUTS = {"globals": {"ep": 1}, "mine": {"ep": 2}}
READER = "get_default_pg_collection"
GIVEN = "moe_layer"


def program(pg):
    return moe_layer(pg).local_expert_indices
