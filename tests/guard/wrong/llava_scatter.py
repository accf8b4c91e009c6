"""LLaVA scatters its embeddings over the globals' ranks (NVIDIA/Megatron-LM #7452, finding 7)."""

import torch
from megatron.core.models.multimodal.llava_model import LLaVAModel

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "get_tensor_model_parallel_group_if_none"
GIVEN = "_process_embedding_token_parallel"


def program(pg):
    model = LLaVAModel.__new__(LLaVAModel)  # without its vision and language models
    torch.nn.Module.__init__(model)
    model.pre_process = model.post_process = model.sequence_parallel_lm = True
    model.context_parallel_lm, model.tp_comm_overlap_lm = 1, False
    model.tensor_model_parallel_size_lm, model.pg_collection = pg.size("tp"), pg
    whole = torch.arange(4.0).view(4, 1, 1)
    part, *_ = model._process_embedding_token_parallel(whole, None, None, None)
    return part.flatten().tolist()
