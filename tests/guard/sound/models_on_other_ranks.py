"""The actor has ranks 0 and 1 and the critic ranks 2 and 3; no process has two layouts."""

import torch.distributed as dist
from layouts import open_session
from models import train

import megapg

WORLD = 4
AMBIGUOUS = False


def program():
    if dist.get_rank() < 2:
        name, sizes = "actor", {"tp": 2, "ranks": range(2)}
    else:
        name, sizes = "critic", {"pp": 2, "ranks": range(2, 4)}
    with open_session(name, **sizes) as session, megapg.published(session.groups) as pg:
        assert len(train(pg)) == 2
