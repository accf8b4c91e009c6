"""Every getter and every private global is read by a function with the published collection."""

import inspect

from layouts import opened

import megapg
from megapg.errors import MissingGroupError
from megapg.megatron import parallel_state

WORLD = 4


def read_all(pg_collection):
    count = 0
    for name, value in list(vars(parallel_state).items()):
        if name.startswith(("get_", "is_")) and callable(value):
            needed = [each.default for each in inspect.signature(value).parameters.values()]
            if inspect.Parameter.empty not in needed:
                count += answers(value, pg_collection)
        elif name.startswith("_") and name[1:2].isupper():
            getattr(parallel_state, name)
    return count


def answers(getter, pg_collection):
    try:
        getter()
    except (AssertionError, KeyError, MissingGroupError, TypeError, ValueError):
        return 0  # not initialised in this layout
    return 1


def read_with(globals_sizes, **sizes):
    with opened(globals=globals_sizes, mine=sizes) as (pg,), megapg.published(pg):
        assert read_all(pg) > 40


def program():
    read_with({"tp": 4}, tp=2, cp=2, ep=2, expt_tp=1)
    read_with({"pp": 2}, pp=4, vpp=2)
    read_with({"tp": 2}, cp=4, hierarchical_cp=(2, 2), hybrid_cp=True)
