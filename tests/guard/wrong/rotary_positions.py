"""A rotary embedding without ``cp_group`` cuts its positions in two: the globals have cp=2."""

from layouts import session_and_globals
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

WORLD = 2
READER = "__init__"
GIVEN = "positions"


def positions(length, pg_collection, **group):
    rope = RotaryEmbedding(8, 1.0, use_cpu_initialization=True, **group)
    assert pg_collection.size("cp") == 1
    return length // rope.cp_group.size()


def program():
    with session_and_globals({"cp": 2}) as pg:
        return positions(8, pg)


def meant():
    with session_and_globals({"cp": 2}) as pg:
        return positions(8, pg, cp_group=pg.cp)
