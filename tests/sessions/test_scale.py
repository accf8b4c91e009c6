"""Number of store calls of many ranks: simulated ranks that run the real code, and real ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("greenlet")

from benchmarks.scale import PHASES, Steps, group_calls, real, same
from megapg.layout import ParallelLayout


def test_simulated_ranks_write_as_often_as_real_ones() -> None:
    played = dict(Steps(ParallelLayout(world_size=4), "gloo").phases(*PHASES))
    found = real(4)
    assert found.keys() == played.keys()
    for phase, tallies in found.items():
        assert same(tallies, played[phase], phase), phase


def test_a_rank_calls_for_no_more_groups_than_there_are_families() -> None:
    layout = ParallelLayout(world_size=1_024, tp=8, pp=8, ep=8)
    fields, everyone, split, unbound = group_calls(layout)
    assert unbound <= split <= fields < everyone
