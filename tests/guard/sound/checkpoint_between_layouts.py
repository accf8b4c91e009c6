"""A checkpoint of the actor's layout is loaded into the critic's, without a block of the user's."""

import torch
from layouts import shared_folder
from models import gpt

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {}}


def program(actor, critic):
    with shared_folder() as folder:
        megapg.save_checkpoint(folder, 1, model=gpt(actor), pg_collection=actor)
        model = gpt(critic)
        before = model.output_layer.weight.detach().clone()
        megapg.load_checkpoint(folder, model=model, pg_collection=critic)
        assert not torch.equal(before, model.output_layer.weight)
