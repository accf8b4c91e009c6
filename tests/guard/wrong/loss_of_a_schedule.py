"""A schedule of the user's gets a loss on the globals' last stage only; its model has one stage."""

import torch
from layouts import session_and_globals
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from models import config

WORLD = 2
READER = "forward_step_calc_loss"
GIVEN = "losses"


def losses(pg_collection, **stage):
    reported = []
    forward_step_calc_loss(
        torch.nn.Identity(),
        torch.ones(()),
        lambda output: (output, float(output)),
        config(pg_collection),
        None,
        False,
        1,
        reported,
        **stage,
    )
    return reported


def program():
    with session_and_globals({"pp": 2}) as pg:
        return losses(pg)


def meant():
    with session_and_globals({"pp": 2}) as pg:
        return losses(pg, cp_group_size=pg.size("cp"), is_last_stage=True)
