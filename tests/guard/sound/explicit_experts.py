"""Experts over tp=2 with sequence parallelism compute on explicit groups, outside of any block."""

from models import gpt, tokens

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
OPTIONS = {
    "experts": 2,
    "add_bias_linear": False,
    "sequence_parallel": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
}


def gradients(pg):
    megapg.seed_all(1, pg)
    model = gpt(pg, **OPTIONS)
    output = model(tokens(), tokens(), None)
    output.square().mean().backward()
    return [parameter.grad.sum().item() for parameter in model.parameters()]


def program(pg):
    alone = gradients(pg)
    with megapg.published(pg):
        assert gradients(pg) == alone
