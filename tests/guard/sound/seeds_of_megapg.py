"""``seed_all`` and the forks of its streams take their ranks from the collection alone."""

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

import megapg

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def program(pg):
    megapg.seed_all(1234, pg)
    state = megapg.capture_rng_state(pg_collection=pg)
    with get_cuda_rng_tracker().fork():
        first = torch.rand(2)
    megapg.restore_rng_state(state, pg_collection=pg)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(first, torch.rand(2))
