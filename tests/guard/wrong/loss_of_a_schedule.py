"""A schedule of the user's gets a loss on the globals' last stage only; its model has one stage."""

import torch
from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
from models import config

LAYOUTS = {"globals": {"pp": 2}, "mine": {}}
READER = "forward_step_calc_loss"


def program(pg_collection):
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
    )
    return reported
