"""An evaluation runs the pipelined schedule of the globals: the first rank reports no loss."""

from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from models import config

LAYOUTS = {"globals": {"pp": 2}, "mine": {}}
READER = "get_forward_backward_func"
GIVEN = "evaluate"


class Model(torch.nn.Module):
    model_type = ModelType.encoder_or_decoder

    def __init__(self, pg):
        super().__init__()
        self.config = config(pg, pipeline_dtype=torch.float32)

    def set_input_tensor(self, tensor):
        pass

    def forward(self, batch):
        return batch.view(2, 1, 16)


def loss_of(output):
    return output.mean(), {"loss": output.mean().item()}


def forward_step(data, model):
    return model(next(data)), partial(loss_of)


def evaluate(model, data, pg_collection):
    schedule = get_forward_backward_func()
    reported = schedule(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=1,
        seq_length=2,
        micro_batch_size=1,
        forward_only=True,
    )
    return sum(each["loss"] for each in reported) / pg_collection.size("pp")


def program(pg):
    return evaluate(Model(pg), iter([torch.ones(32) + pg.rank("dp")]), pg)
