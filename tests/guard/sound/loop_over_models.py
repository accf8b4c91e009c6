"""A loop publishes one of two models at a time, and its variables hold the other one as well."""

import torch
from megatron.core import mpu
from models import gpt, tokens

import megapg

LAYOUTS = {"first": {"tp": 2}, "second": {}}


def vocabulary(model):
    with torch.no_grad():
        logits = model(tokens(), tokens(), None)
    return logits.shape[-1] * mpu.get_tensor_model_parallel_world_size()


def program(*both):
    models = [gpt(pg) for pg in both]
    for model, pg in zip(models, both, strict=True):
        other = models[1 - models.index(model)]
        with megapg.published(pg):
            assert vocabulary(model) == 32
        assert other is not model
