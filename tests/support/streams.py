"""The random streams of this process: their next numbers, and records to compare."""

import random

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def draw():
    """Return stream -> its next numbers; the tracker's streams need the CPU kit."""
    drawn = {
        "python": tuple(random.random() for _ in range(3)),
        "numpy": tuple(np.random.rand(3).tolist()),
        "torch": tuple(torch.rand(3).tolist()),
    }
    tracker = get_cuda_rng_tracker()
    for name in sorted(tracker.get_states()):
        with tracker.fork(name):
            drawn[name] = tuple(torch.rand(3).tolist())
    return drawn


def plain(value):
    """Return a comparable value, which can be hashed if it has no dictionary."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    return np.asarray(value).tobytes() if isinstance(value, (torch.Tensor, np.ndarray)) else value
