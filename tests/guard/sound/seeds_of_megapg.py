"""``seed_all`` and the forks of its streams take their ranks from the collection alone."""

import torch
from layouts import session_and_globals
from megatron.core.tensor_parallel import get_cuda_rng_tracker

import megapg

WORLD = 2


def program():
    with session_and_globals({"tp": 1}, tp=2) as pg:
        megapg.seed_all(1234, pg)
        state = megapg.capture_rng_state(pg_collection=pg)
        with get_cuda_rng_tracker().fork():
            first = torch.rand(2)
        megapg.restore_rng_state(state, pg_collection=pg)
        with get_cuda_rng_tracker().fork():
            assert torch.equal(first, torch.rand(2))
