"""Both stages export their layers under the same numbers: the offset is that of the globals."""

from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from models import config

LAYOUTS = {"globals": {"pp": 1}, "mine": {"pp": 2}}
READER = "get_transformer_layer_offset"
GIVEN = "export_names"


def export_names(pp_group, stage):
    start = get_transformer_layer_offset(stage)
    return [f"layers.{start + index}" for index in range(4 // pp_group.size())]


def program(pg):
    return export_names(pg.pp, config(pg, num_layers=4))
