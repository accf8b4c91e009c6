"""A checkpoint of the actor's layout is loaded into the critic's, without a block of the user's."""

import os
import tempfile

import torch
import torch.distributed as dist
from layouts import two_sessions
from models import gpt

import megapg

WORLD = 2


def program():
    with two_sessions({"tp": 2}, {}) as (actor, critic):
        folder = [tempfile.mkdtemp() if os.environ["RANK"] == "0" else None]
        dist.broadcast_object_list(folder, 0)
        megapg.save_checkpoint(folder[0], 1, model=gpt(actor), pg_collection=actor)
        model = gpt(critic)
        before = model.output_layer.weight.detach().clone()
        megapg.load_checkpoint(folder[0], model=model, pg_collection=critic)
        assert not torch.equal(before, model.output_layer.weight)
