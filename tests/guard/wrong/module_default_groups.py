"""A layer that is built without the collection takes all groups of the globals as its own."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from models import config

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "use_mpu_process_groups"


def program(pg):
    layer = build_module(get_gpt_layer_local_spec(), config=config(pg))
    return list(layer.mlp.linear_fc1.weight.shape)
