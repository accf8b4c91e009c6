"""A checkpoint is written in the background while the other model trains."""

from layouts import shared_folder
from models import gpt, train

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {}}


def program(actor, critic):
    with shared_folder() as folder:
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
