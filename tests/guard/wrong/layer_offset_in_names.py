"""Both stages export their layers under the same numbers: the offset is that of the globals."""

from layouts import session_and_globals
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from models import config

WORLD = 2
READER = "get_transformer_layer_offset"
GIVEN = "export_names"


def export_names(pp_group, stage, **rank):
    start = get_transformer_layer_offset(stage, **rank)
    return [f"layers.{start + index}" for index in range(4 // pp_group.size())]


def program():
    with session_and_globals({"pp": 1}, pp=2) as pg:
        return export_names(pg.pp, config(pg, num_layers=4))


def meant():
    with session_and_globals({"pp": 1}, pp=2) as pg:
        return export_names(pg.pp, config(pg, num_layers=4), pp_rank=pg.rank("pp"))
