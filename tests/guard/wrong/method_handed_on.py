"""A loop calls a bound method, whose object kept only numbers; the loop has the collection."""

from megatron.core.parallel_state import get_data_parallel_rank

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
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


def program(pg):
    return saved(pg, Saver())
