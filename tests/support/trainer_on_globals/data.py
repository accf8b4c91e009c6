"""The samples of each replica, and means over the replicas."""

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_data_parallel_group, get_data_parallel_rank
from megatron.core.parallel_state import get_data_parallel_world_size as replicas

SAMPLES = 8  # samples of a step, over all replicas


def my_samples(step, length, words):
    """Return tokens, labels and positions of this replica's microbatches."""
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(words, (SAMPLES, length + 1), generator=generator)
    mine = windows[get_data_parallel_rank() :: replicas()]
    positions = torch.arange(length).expand(2, -1)
    return [(each[:, :-1], each[:, 1:], positions) for each in mine.split(2)]


def mean_over_data(value):
    dist.all_reduce(value, group=get_data_parallel_group())
    return value / replicas()
