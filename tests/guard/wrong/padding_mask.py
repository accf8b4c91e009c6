"""GPT scatters its padding mask over the globals (NVIDIA/Megatron-LM #7452, finding 5)."""

import torch
from models import gpt, tokens

import megapg

WORLD = 4
LAYOUTS = {"first": {"tp": 2}, "second": {"tp": 2, "order": "cp-dp-tp-pp-ep"}}
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "_preprocess"


def mask_of_this_rank(model):
    mask = torch.tensor([[False] * 4 + [True] * 4])
    inputs = model._preprocess(tokens(), tokens(), padding_mask=mask)
    return next(each for each in inputs if each is not None and each.dtype is torch.bool).tolist()


def built(pg):
    with megapg.published(pg):
        return gpt(pg, sequence_parallel=True)


def program(policy, critic):
    model = built(policy)
    with megapg.published(critic):
        return mask_of_this_rank(model)
