"""A checkpoint is written in the background while the other model trains."""

from layouts import shared_folder, two_sessions
from models import gpt, train

import megapg

WORLD = 2


def program():
    with two_sessions({"tp": 2}, {}) as (actor, critic), shared_folder() as folder:
        save = megapg.save_checkpoint(
            folder, 1, model=gpt(actor), pg_collection=actor, asynchronous=True
        )
        with megapg.published(critic):
            train(critic)
        assert save.wait().path.is_dir()
        found = megapg.load_checkpoint(
            folder, model=gpt(actor), pg_collection=actor, weights_only=True
        )
        assert found.iteration == 1
