"""A checkpoint is written in the background while the other model trains."""

import os
import tempfile

import torch.distributed as dist
from layouts import two_sessions
from models import gpt, train

import megapg

WORLD = 2


def program():
    with two_sessions({"tp": 2}, {}) as (actor, critic):
        folder = [tempfile.mkdtemp() if os.environ["RANK"] == "0" else None]
        dist.broadcast_object_list(folder, 0)
        save = megapg.save_checkpoint(
            folder[0], 1, model=gpt(actor), pg_collection=actor, asynchronous=True
        )
        with megapg.published(critic):
            train(critic)
        assert save.wait().path.is_dir()
        found = megapg.load_checkpoint(
            folder[0], model=gpt(actor), pg_collection=actor, weights_only=True
        )
        assert found.iteration == 1
