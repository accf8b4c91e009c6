"""A rotary embedding without ``cp_group`` cuts its positions in two: the globals have cp=2."""

from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

LAYOUTS = {"globals": {"cp": 2}, "mine": {}}
READER = "__init__"
GIVEN = "positions"


def positions(length, pg_collection):
    rope = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    assert pg_collection.size("cp") == 1
    return length // rope.cp_group.size()


def program(pg):
    return positions(8, pg)
