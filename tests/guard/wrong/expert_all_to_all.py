"""A dispatcher of the user's exchanges its tokens over the globals' expert group, of one rank."""

import torch
from layouts import session_and_globals
from megatron.core import mpu
from megatron.core.tensor_parallel import all_to_all

import megapg

WORLD = 2
READER = "exchange"
GIVEN = "dispatch"


class Dispatcher:
    def __init__(self, ep_group):
        self.ep_group = ep_group

    def dispatch(self, tokens):
        return exchange(tokens).tolist()


def exchange(tokens):
    return all_to_all(mpu.get_expert_model_parallel_group(), tokens)


def program():
    with session_and_globals({"ep": 1}, ep=2) as pg:
        return Dispatcher(pg.ep).dispatch(torch.arange(2) + 10 * pg.rank("ep"))


def meant():
    with session_and_globals({"ep": 1}, ep=2) as pg, megapg.published(pg):
        return Dispatcher(pg.ep).dispatch(torch.arange(2) + 10 * pg.rank("ep"))
