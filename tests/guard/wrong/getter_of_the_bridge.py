"""A getter of megapg gets the view of the globals, and answers their first rank."""

import megapg
from megapg.megatron import getters

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "program"


def program(pg):
    return [getters.tensor_src_rank(megapg.resolve(None)), pg.size("dp")]
