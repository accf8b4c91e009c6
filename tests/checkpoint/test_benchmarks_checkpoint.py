"""Tests of the checkpoint benchmark: each row reports the right measurement."""

from contextlib import nullcontext

import torch

from benchmarks.checkpoint_trials import _without_checksums
from megapg.checkpoint.planning import shard
from megapg.checkpoint.writer import write_items


def test_without_checksums_there_is_none(tmp_path):
    def digests(rank):
        _, sums = write_items(tmp_path, rank, items, lambda: None, nullcontext)
        [found] = sums.values()
        return {found.digest, *found.entries}

    items = [shard("a", (2,), (0,), torch.ones(2))]
    with _without_checksums():
        assert digests(0) == {"0" * 32}
    assert "0" * 32 not in digests(1)
