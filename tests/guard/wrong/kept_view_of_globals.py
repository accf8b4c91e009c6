"""A trainer keeps the view of the globals that ``resolve()`` gave it, and is given groups later."""

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "columns"
GIVEN = "columns"


class Trainer:
    def __init__(self):
        self.groups = megapg.resolve(None)

    def columns(self, width, pg):
        return width // self.groups.size("tp") + pg.size("dp")


def program(pg):
    return Trainer().columns(8, pg)
