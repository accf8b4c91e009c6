"""Migrated functions resolve a collection that they are passed, or the one that a model carries."""

from models import gpt

import megapg
from megapg.megatron import resolves

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


@resolves(needs=("tp",))
def columns(width, *, pg_collection=None):
    return width // pg_collection.size("tp")


def layers_of(model):
    return megapg.groups_of(model, "tp").size("tp")


def program(pg):
    assert columns(8, pg_collection=pg) == 4
    assert layers_of([gpt(pg)]) == 2
    with megapg.published(pg):
        assert columns(8) == 4
