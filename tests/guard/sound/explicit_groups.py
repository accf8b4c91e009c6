"""Every call of a tensor parallel function gets its group, so the globals answer nothing."""

import torch
from megatron.core import tensor_parallel as tp
from models import VOCABULARY, config

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def program(pg):
    words = tp.VocabParallelEmbedding(
        VOCABULARY,
        4,
        init_method=torch.nn.init.ones_,
        config=config(pg),
        tp_group=pg.tp,
    )
    hidden = words(torch.arange(4).view(1, 4)).transpose(0, 1)
    mine = tp.scatter_to_sequence_parallel_region(hidden, group=pg.tp)
    whole = tp.gather_from_sequence_parallel_region(mine, group=pg.tp)
    total = tp.reduce_from_tensor_model_parallel_region(whole, group=pg.tp)
    tp.model_parallel_cuda_manual_seed(
        1, tp_rank=pg.rank("tp"), ep_rank=pg.rank("ep"), etp_rank=pg.rank("expt_tp")
    )
    assert total.sum().item() == 2 * 4 * 4
