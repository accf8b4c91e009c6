"""Fields that share a communicator (rule 4), planned for backends without their hardware."""

import pytest

from benchmarks import backends
from megapg.communicators.backends import BACKENDS
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import Recipe, communicators, families
from megapg.layout import ParallelLayout


def recipe(backend, **changes):
    values = {"options": {}, "dedicated": frozenset(), "all_gather_groups": False, **changes}
    return Recipe(backend=backend, lanes=BACKENDS[backend].lanes, **values)


def shared(layout, recipe, rank=0):
    return [set(c.fields) for c in communicators(layout, recipe, rank)]


def test_gloo_makes_one_per_distinct_rank_set():
    layout = ParallelLayout(world_size=16, tp=2, pp=2, ep=2)
    for rank in range(16):
        made = communicators(layout, recipe("gloo"), rank)
        assert len({c.ranks for c in made}) == len(made)


def test_nccl_keeps_apart_what_can_be_in_flight_together():
    layout = ParallelLayout(world_size=16, tp=2, pp=2)
    groups = shared(layout, recipe("nccl", all_gather_groups=True))
    for apart in (("pp", "embd"), ("dp_cp", "expt_dp"), ("tp", "tp_ep"), ("dp_cp", "dp_cp_ag")):
        assert not any(set(apart) <= group for group in groups), apart
    for together in (("dp", "dp_cp", "intra_dp_cp"), ("expt_dp", "intra_expt_dp"), ("tp", "tp_cp")):
        assert any(set(together) <= group for group in groups), together


def test_all_size_one_groups_of_a_rank_are_one():
    alone = ParallelLayout(world_size=1)
    options = {"dp": CommunicatorOptions(max_ctas=8)}
    for backend in ("gloo", "nccl"):
        assert len(shared(alone, recipe(backend, options=options))) == 1
    assert len(shared(alone, recipe("nccl", dedicated=frozenset({"tp"})))) == 2


def test_dedicated_and_options_reach_the_levels_of_hcp():
    layout = ParallelLayout(world_size=8, cp=8, hierarchical_cp=(8,))
    assert {"hcp.0"} not in shared(layout, recipe("gloo"))
    assert {"hcp.0"} in shared(layout, recipe("gloo", dedicated=frozenset({"hcp"})))
    fast = CommunicatorOptions(is_high_priority_stream=True)
    made = communicators(layout, recipe("nccl", options={"hcp": fast}), 0)
    assert [c.fields for c in made if c.options == fast] == [("hcp.0",)]


@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "pp": 4}, {"cp": 8}])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_family_is_what_all_ranks_make_in_one_call(sizes, backend):
    """The test uses backends on which groups are split from WORLD."""
    layout = ParallelLayout(world_size=16, **sizes)
    made = families(layout, recipe(backend))
    assert len(made) <= len(layout.families)
    assert len({each.label for family in made for each in family.members}) == sum(
        len(family.groups) for family in made
    )
    for family in made:
        ranks = [rank for each in family.members for rank in each.ranks]
        assert len(ranks) == len(set(ranks))
    for rank in range(16):
        mine = [one for family in made if (one := family.of(rank)) is not None]
        held = {field: one.ranks for one in mine for field in one.fields}
        # The groups are the same as if only members create them, but fewer fields may share.
        alone = communicators(layout, recipe(backend), rank)
        assert held == {field: one.ranks for one in alone for field in one.fields}
        assert len(mine) >= len(alone)


def test_a_gloo_companion_is_another_communicator_only_where_the_backend_is_another():
    layout = ParallelLayout(world_size=16, tp=2, pp=2, hybrid_cp=True)
    asked = frozenset({"dp_cp", "expt_dp"})
    same = communicators(layout, recipe("gloo", gloo=asked), 0)
    assert {c.backend for c in same} == {"gloo"}
    assert {"dp", "dp_cp", "gloo.dp_cp", "gloo.expt_dp"} <= set(
        next(c.fields for c in same if "dp" in c.fields)
    )
    apart = communicators(layout, recipe("nccl", gloo=asked), 0)
    assert [(c.fields, c.backend) for c in apart if c.backend != "nccl"] == [
        (("gloo.dp_cp", "gloo.expt_dp"), "gloo")
    ]
    assert not any(
        "gloo." in field for c in communicators(layout, recipe("nccl"), 0) for field in c.fields
    )
    fake = communicators(layout, recipe("fake", gloo=asked), 0)
    assert {c.backend for c in fake} == {"fake"}


def test_the_table_of_backends_has_a_row_for_each_way_to_make_groups():
    rows = {row[0]: row[1:] for row in backends.table().rows}
    assert {name.partition(",")[0] for name in rows} == {*BACKENDS}
    assert rows["gloo"][-2:] == ("it keeps no memory of a device", "none")
    bound, lazy = (rows[f"nccl, WORLD {how}"] for how in ("bound to one", "not bound to a device"))
    assert (bound[0], lazy[0]) == ("all ranks, split from WORLD", "its members")
    assert int(bound[1]) <= 26  # a rank makes at most one call per family
    assert int(bound[1]) == int(bound[2])
