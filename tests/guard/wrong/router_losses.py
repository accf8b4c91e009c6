"""The balancing loss in the log is summed over the globals' pipeline: twice what the router had."""

import torch
from megatron.core.transformer.moe import moe_utils

LAYOUTS = {"globals": {"pp": 2}, "mine": {}}
READER = "reduce_aux_losses_tracker_across_ranks"
GIVEN = "log_router"
CORES = ("0.16", "0.17")


def log_router(loss, pg):
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    moe_utils.save_to_aux_losses_tracker("load_balancing_loss", loss, 1, 1)
    logged = {}
    moe_utils.track_moe_metrics(1.0, 1, total_loss_dict=logged, num_layers=1)
    moe_utils.get_moe_layer_wise_logging_tracker().clear()
    return logged["load_balancing_loss"].item() * pg.size("pp")


def program(pg):
    return log_router(torch.tensor(3.0), pg)
