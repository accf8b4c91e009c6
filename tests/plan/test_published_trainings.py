"""The published trainings that plans are compared with."""

from __future__ import annotations

import pytest
import torch

from benchmarks.published import TRAININGS, Gpt, Published, planned
from megapg.testing import fake_collection, megatron_on_cpu

GPTS = [each for each in TRAININGS if isinstance(each.model, Gpt)]


@pytest.mark.parametrize("each", TRAININGS, ids=lambda each: each.row)
def test_the_ranks_and_samples_of_a_published_training_divide(each: Published) -> None:
    layout, cluster, _, job = planned(each)
    assert layout.dp * job.micro_batch_size * job.microbatches == each.samples
    assert layout.world_size % cluster.node_size == 0
    assert layout.vpp is None or job.microbatches % layout.pp == 0


@pytest.mark.parametrize("each", GPTS, ids=lambda each: each.row)
def test_a_published_number_of_parameters(each: Published) -> None:
    assert isinstance(each.model, Gpt)
    _, _, model, job = planned(each)
    with megatron_on_cpu(), fake_collection() as pg, torch.device("meta"):
        weights = sum(part.numel() for part in model.build(pg, job=job).parameters())
    assert round(weights / 1e9, 1) == each.model.billions
