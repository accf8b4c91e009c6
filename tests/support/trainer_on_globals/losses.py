"""Losses of a policy, over a vocabulary that is sharded over the tensor parallel ranks."""

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region


def entropy(logits, labels):
    """Return the mean negative log probability of the labels, and the mean entropy."""
    rank = mpu.get_tensor_model_parallel_rank()
    highest = logits.detach().amax(-1)
    if mpu.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=mpu.get_tensor_model_parallel_group())
    shifted = logits - highest.unsqueeze(-1)
    total = reduce_from_tensor_model_parallel_region(
        shifted.exp().sum(-1), group=mpu.get_tensor_model_parallel_group()
    )
    mine = labels - rank * logits.shape[-1]
    here = (mine >= 0) & (mine < logits.shape[-1])
    of_label = shifted.gather(-1, mine.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    of_label = reduce_from_tensor_model_parallel_region(
        torch.where(here, of_label, torch.zeros_like(of_label)),
        group=mpu.get_tensor_model_parallel_group(),
    )
    weighted = (shifted.detach().exp() * shifted.detach()).sum(-1)
    dist.all_reduce(weighted, group=mpu.get_tensor_model_parallel_group())
    spread = total.detach().log() - weighted / total.detach()
    return (total.log() - of_label).mean(), spread.mean()
