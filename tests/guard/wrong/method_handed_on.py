"""A loop calls a bound method, whose object kept only numbers; the loop has the collection."""

from layouts import session_and_globals
from megatron.core.parallel_state import get_data_parallel_rank

import megapg

WORLD = 2
READER = "save_if_first"
GIVEN = "run_hooks"


class Saver:
    def __init__(self):
        self.saved = []

    def save_if_first(self, step):
        if get_data_parallel_rank() == 0:
            self.saved.append(step)


def run_hooks(hooks, groups):
    for hook in hooks:
        hook(groups.size("tp"))


def saved(pg, saver):
    run_hooks([saver.save_if_first], pg)
    return saver.saved


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        return saved(pg, Saver())


def meant():
    with session_and_globals({"tp": 1}, tp=2) as pg, megapg.published(pg):
        return saved(pg, Saver())
