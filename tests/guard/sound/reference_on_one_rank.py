"""A reference model lives on one rank beside a policy on two, each in its own session."""

import torch
from layouts import open_session
from models import gpt, tokens

import megapg


def program():
    with open_session("policy", tp=2) as policy:
        me = policy.rank
        with open_session(f"reference {me}", ranks=[me]) as reference:
            losses = []
            for pg in (policy.groups, reference.groups):
                with megapg.published(pg), torch.no_grad():
                    losses.append(gpt(pg)(tokens(), tokens(), None, labels=tokens()).mean())
        assert losses[0] != losses[1]
