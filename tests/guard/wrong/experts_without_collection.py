"""An MoE layer that is built without the collection keeps all experts on each rank (ep=1)."""

from layouts import session_and_globals
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from models import config

WORLD = 2
READER = "get_default_pg_collection"
GIVEN = "local_experts"


def local_experts(pg, **collection):
    experts = config(pg, num_moe_experts=4, add_bias_linear=False)
    layer = get_gpt_layer_local_spec(num_experts=4).submodules.mlp
    return build_module(layer, config=experts, layer_number=1, **collection).local_expert_indices


def program():
    with session_and_globals({"ep": 1}, ep=2) as pg:
        return local_experts(pg)


def meant():
    with session_and_globals({"ep": 1}, ep=2) as pg:
        return local_experts(pg, pg_collection=pg)
