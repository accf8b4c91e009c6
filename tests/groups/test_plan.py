"""Which fields share a communicator: rule 4, on backends that need no such hardware to plan for."""

from megapg.communicators.backends import BACKENDS
from megapg.communicators.options import CommunicatorOptions
from megapg.communicators.plan import Recipe, communicators, every_communicator
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


def test_every_rank_lists_all_communicators_in_one_order():
    """For backends that want all ranks of WORLD to make each group together."""
    layout = ParallelLayout(world_size=8, tp=2, pp=2, ep=2)
    everyone = list(every_communicator(layout, recipe("nccl")))
    assert len(everyone) == len(set(everyone)) == len({c.label for c in everyone})
    for rank in range(8):
        mine = [c for c in everyone if rank in c.ranks]
        assert set(mine) == set(communicators(layout, recipe("nccl"), rank))


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
