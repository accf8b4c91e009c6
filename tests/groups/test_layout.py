"""ParallelLayout alone: helpful errors, sub-worlds, coordinates, fingerprints, laziness.

``test_layout_against_megatron.py`` checks that the groups equal Megatron's.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import captured

from megapg.errors import LayoutError, UnknownFieldError
from megapg.layout import FIELDS, ParallelLayout

# All axes are larger than one, so that no two axes look alike.
RICH = {"world_size": 48, "tp": 2, "cp": 3, "pp": 2, "ep": 6, "expt_tp": 1}
RICH_LAYOUTS = [
    ParallelLayout(**RICH),
    ParallelLayout(**RICH, order="dp-ep-cp-tp-pp"),
    ParallelLayout(**RICH | {"ep": 3, "expt_tp": 2}, order="pp-dp-ep-tp-cp"),
    ParallelLayout(**RICH | {"ep": 4}, optimizer_instances=2, order="cp-tp-dp-ep-pp"),
]
EACH_RICH_LAYOUT = pytest.mark.parametrize(
    "layout", RICH_LAYOUTS, ids=lambda layout: f"{layout.order}-ep{layout.ep}"
)

# The scale of the largest jobs.
LARGE = {"world_size": 131_072, "tp": 8, "cp": 4, "pp": 16, "ep": 64, "expt_tp": 1}


def divisors_of(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@st.composite
def valid_sizes(draw: st.DrawFn) -> dict[str, Any]:
    world_size = draw(st.sampled_from((1, 2, 4, 6, 8, 12, 16, 24)))
    pp = draw(divisors_of(world_size))
    tp = draw(divisors_of(world_size // pp))
    cp = draw(divisors_of(world_size // pp // tp))
    ep = draw(divisors_of(world_size // pp))
    expt_tp = draw(divisors_of(world_size // pp // ep))
    instances = math.gcd(world_size // pp // tp, world_size // pp // ep // expt_tp)
    return {
        "world_size": world_size,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "expt_tp": expt_tp,
        "optimizer_instances": draw(divisors_of(instances)),
        "hierarchical_cp": (cp,),
    }


# Errors -------------------------------------------------------------------------------------------


def refusal(**settings_: Any) -> str:
    """Return the message with which these settings are refused."""
    with pytest.raises(LayoutError) as caught:
        ParallelLayout(**settings_)
    return str(caught.value)


def suggestions_in(message: str) -> list[dict[str, int]]:
    """Return the changes that a message proposes, as keyword arguments."""
    _, found, listed = message.partition("Nearest that fit: ")
    if not found:
        return []
    options = listed.removesuffix(".").split("; or ")
    return [{k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", option)} for option in options]


# Settings, and parts of the error: "^" marks its beginning, "$" its end.
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (sizes, f"^{arithmetic}")
        for sizes, arithmetic in (
            (
                {"world_size": 16, "tp": 2, "pp": 3},
                "world_size=16 does not divide by tp=2 x pp=3 x cp=1 = 6 (16 = 2 x 6 + 4).",
            ),
            (
                {"world_size": 16, "tp": 2, "pp": 2, "ep": 3},
                "world_size=16 does not divide by expt_tp=2 x ep=3 x pp=2 = 12 (16 = 1 x 12 + 4).",
            ),
            (
                {"world_size": 2, "tp": 4},
                "world_size=2 does not divide by tp=4 x pp=1 x cp=1 = 4 (2 = 0 x 4 + 2).",
            ),
            (
                {"world_size": 8, "tp": 2, "optimizer_instances": 3},
                "dp x cp=4 does not divide by optimizer_instances = 3 (4 = 1 x 3 + 1).",
            ),
            (
                {"world_size": 8, "ep": 4, "optimizer_instances": 4},
                "expt_dp=2 does not divide by optimizer_instances = 4 (2 = 0 x 4 + 2).",
            ),
        )
    ),
    *(
        (RICH | {"ep": 3, "order": order}, f"^order={order!r}*{complaint}")
        for order, complaint in (
            ("tp-cp-ep-dp", "lacks the axis 'pp', whose size is 2"),
            ("tp-cp-ep-pp", "lacks the axis 'dp', whose size is 8"),
            ("cp-ep-dp-pp", "lacks the axis 'tp', whose size is 2"),
            ("tp-cp-dp-pp", "lacks the axis 'ep', whose size is 3"),
            ("tp-ep-dp-pp", "lacks the axis 'cp', whose size is 3"),
            ("tp-cp-ep-dp-pp-tp", "has the axis 'tp' more than once"),
            ("tp-cp-ep-dp-xp-pp", "'xp' is no axis; use tp, cp, ep, dp, pp joined by -"),
            ("tp,cp,ep,dp,pp", "'tp,cp,ep,dp,pp' is no axis"),
            ("", "'' is no axis"),
        )
    ),
    *(  # Each axis has two sizes, one per grid; either size may require the axis in the order.
        (sizes | {"world_size": 4, "order": order}, f"lacks the axis '{lacking}'")
        for sizes, order, lacking in (
            ({"expt_tp": 2, "tp": 1}, "cp-ep-dp-pp", "tp"),
            ({"tp": 2, "expt_tp": 1, "ep": 4}, "cp-ep-dp-pp", "tp"),
            ({"tp": 4, "expt_tp": 2}, "tp-cp-ep-pp", "dp"),
            ({"tp": 2, "expt_tp": 4}, "tp-cp-ep-pp", "dp"),
        )
    ),
    (
        {"world_size": 8, "tp": 2, "expt_tp": 1, "ep": 2, "pp": 2, "order": "tp-pp-cp-ep-dp"},
        "would be 2 ranks apart in the dense grid and 1 in the expert grid*Put pp last.$",
    ),
    (  # Pipelines are the same in both grids here, but Megatron still refuses.
        {"world_size": 16, "tp": 2, "expt_tp": 2, "ep": 2, "pp": 2, "order": "tp-pp-cp-ep-dp"},
        "dp=4 and expt_dp=2 would have to be equal*Put pp last.$",
    ),
    *(
        ({"world_size": 4, "pp": 2, "vpp": vpp}, f"^vpp={vpp} with pp=2: a virtual")
        for vpp in (0, -1, 1.5)
    ),
    ({"world_size": 4, "vpp": 2}, "needs pp > 1"),
    (
        {"world_size": 8, "cp": 8, "hierarchical_cp": (2, 2, 3)},
        "^hierarchical_cp: 2 x 2 x 3 = 12, but cp=8.$",
    ),
    *(
        (
            {"world_size": 8, "cp": 8, "hierarchical_cp": levels},
            f"^hierarchical_cp[0]={levels[0]}: sizes are whole numbers from 1.$",
        )
        for levels in ((-2, -4), (2.0, 4))
    ),
    *(
        ({"world_size": 4, "ranks": ranks}, said)
        for said, refused in {
            "give each rank once": ((0, 1, 1, 3), (2, 2, 2, 2)),
            "give one global rank (from 0) for each": (
                *(range(-1, 3), range(2, -2, -1), (-4, 0, 1, 2), (0, 2, -4, 1)),
            ),
            "ranks are whole numbers": ((0, 1.0, 2, 3), (*"0123",), (0.5, 1.5, 2.5, 3.5)),
        }.items()
        for ranks in refused
    ),
    *(
        ({"world_size": 4, "ranks": ranks}, f"are {len(ranks)} ranks, but world_size=4")
        for ranks in (range(3), range(5), (7,), (0, 1, 2, 3, 9))
    ),
]


@pytest.mark.parametrize(("settings_", "said"), REFUSED)
def test_a_refusal_says_what_is_wrong(settings_: dict[str, Any], said: str) -> None:
    message = f"^{refusal(**settings_)}$"
    for part in said.split("*"):
        assert part in message


def test_suggestions_are_the_nearest_on_each_side_and_per_size() -> None:
    assert suggestions_in(refusal(world_size=16, tp=2, pp=3)) == [
        {"world_size": 12},
        {"world_size": 18},
        {"pp": 2},
    ]


# Settings that the sizes alone do not show, so that a suggestion could ignore them.
SURROUNDINGS: list[dict[str, Any]] = [
    {},
    {"order": "tp-pp-cp-ep-dp"},
    {"vpp": 2},
    {"hierarchical_cp": (2, 2)},
    {"ranks": range(100, 112)},
]


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 40), st.tuples(*[st.integers(1, 6)] * 6), st.sampled_from(SURROUNDINGS))
def test_every_suggestion_fits(
    world_size: int, sizes: tuple[int, ...], surroundings: dict[str, Any]
) -> None:
    names = ("tp", "pp", "cp", "ep", "expt_tp", "optimizer_instances")
    if "ranks" in surroundings:
        world_size = 12
    if "hierarchical_cp" in surroundings:
        sizes = (*sizes[:2], 4, *sizes[3:])
    wanted = {"world_size": world_size, **dict(zip(names, sizes, strict=True)), **surroundings}
    try:
        ParallelLayout(**wanted)
    except LayoutError as error:
        for change in suggestions_in(str(error)):
            ParallelLayout(**wanted | change)  # must not raise


@pytest.mark.parametrize(
    "name", ["world_size", "tp", "pp", "cp", "ep", "expt_tp", "optimizer_instances"]
)
@pytest.mark.parametrize("size", [-1, 1.0, "2", True])
def test_sizes_are_whole_numbers_from_one(name: str, size: object) -> None:
    assert refusal(**{"world_size": 8, name: size}).startswith(f"{name}={size!r}: sizes are whole")


def test_zero_is_no_size_except_for_expt_tp_where_it_means_tp() -> None:
    assert refusal(world_size=0) == "world_size=0: sizes are whole numbers from 1."
    assert ParallelLayout(world_size=4, tp=2, expt_tp=0).expt_tp == 2


def test_axes_of_size_one_may_be_left_out() -> None:
    short = ParallelLayout(world_size=8, tp=2, order="dp-tp")
    full = ParallelLayout(world_size=8, tp=2, order="dp-tp-cp-ep-pp")
    assert {f: list(short.partition(f)) for f in short.families} == {
        f: list(full.partition(f)) for f in full.families
    }


# Ranks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [-1, 3, 8, 100])
def test_rank_outside_the_sub_world_is_refused_with_the_ranks_there_are(rank: int) -> None:
    layout = ParallelLayout(world_size=4, tp=2, ranks=range(4, 8))
    for ask in (lambda: layout.members("tp", rank), lambda: layout.coordinates(rank)):
        with pytest.raises(LayoutError, match=rf"^rank {rank} is not in .* has the ranks 4-7\.$"):
            ask()


def test_rank_in_a_gap_of_the_sub_world_is_refused() -> None:
    layout = ParallelLayout(world_size=3, ranks=(0, 3, 5))
    with pytest.raises(LayoutError, match=r"rank 4 is not in .* ranks \(0, 3, 5\)"):
        layout.members("dp", 4)


@pytest.mark.parametrize(
    "ranks",
    [
        *(range(4, 52), range(3, 99, 2), (*range(7), 20, *range(40, 80))),
        *(range(50, 2, -1), (*range(60, 70), 3, *range(3), *range(40, 6, -1))),
    ],
)
@EACH_RICH_LAYOUT
def test_sub_world_is_the_whole_world_with_other_numbers(
    layout: ParallelLayout, ranks: Sequence[int]
) -> None:
    part = dataclasses.replace(layout, ranks=ranks)
    for family in layout.families:
        mapped = [tuple(ranks[rank] for rank in group) for group in layout.partition(family)]
        assert list(part.partition(family)) == mapped
    for position, rank in enumerate(ranks):
        assert part.coordinates(rank) == layout.coordinates(position)
        for family in layout.families:
            moved = tuple(ranks[r] for r in layout.members(family, position))
            assert part.members(family, rank) == moved


def test_embedding_callable_of_a_sub_world_sees_global_ranks() -> None:
    seen: list[list[int]] = []

    def choose(pipeline: list[int]) -> list[int]:
        seen.append(pipeline)
        return pipeline[1:]

    layout = ParallelLayout(world_size=4, pp=2, ranks=(2, 3, 7, 8), embedding_ranks=choose)
    assert list(layout.partition("embd")) == [(7,), (8,)]
    assert seen == [[2, 7], [3, 8]]
    assert layout.members("embd", 8) == (8,)
    assert seen[2:] == [[3, 8]]


# Fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["members", "partition"])
@pytest.mark.parametrize(
    ("field", "answer"),
    [
        ("zz", r"^'zz' is no field; the fields are tp, pp, mp, .*, hcp\.$"),
        ("tensor", r"^'tensor' is no field; did you mean 'tp'\?$"),
        ("", "^'' is no field"),
        ("TP", r"^'TP' is no field; did you mean 'tp'\?$"),
        ("inter_dist_opt", r"^inter_dist_opt exists only with optimizer_instances > 1\.$"),
        ("hcp", r"^hcp exists only with hierarchical_cp=\(\.\.\.\)\.$"),
        ("hcp.0", r"^hcp\.0 exists only with hierarchical_cp"),
    ],
)
def test_unknown_field_is_answered_with_what_there_is(ask: str, field: str, answer: str) -> None:
    layout = ParallelLayout(world_size=8, tp=2)
    arguments = (field, 0) if ask == "members" else (field,)
    with pytest.raises(UnknownFieldError, match=answer):
        getattr(layout, ask)(*arguments)  # partition raises at once, too, not at the first next()


@pytest.mark.parametrize("field", ["hcp", "hcp.2", "hcp.x", "hcp.-1"])
def test_hcp_is_asked_for_by_level(field: str) -> None:
    layout = ParallelLayout(world_size=8, cp=4, hierarchical_cp=(2, 2))
    with pytest.raises(UnknownFieldError, match=r"has levels; ask for hcp\.0 or hcp\.1\."):
        layout.members(field, 0)


def test_families_are_the_fields_that_are_configured() -> None:
    plain = set(ParallelLayout(world_size=8).families)
    assert plain == set(FIELDS) - {"hcp", "inter_dist_opt"}
    rich = ParallelLayout(world_size=8, cp=4, hierarchical_cp=(2, 2), optimizer_instances=2)
    assert set(rich.families) - plain == {"inter_dist_opt", "hcp.0", "hcp.1"}


@settings(max_examples=100, deadline=None)
@given(valid_sizes())
def test_families_partition_the_ranks(sizes: dict[str, Any]) -> None:
    layout = ParallelLayout(**sizes)
    for family in set(layout.families) - {"embd", "pos_embd"}:
        groups = list(layout.partition(family))
        assert sorted(rank for group in groups for rank in group) == list(layout.ranks)
        assert all(list(group) == sorted(group) for group in groups)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        assert all(layout.members(family, rank) == group for group in groups for rank in group)


def test_embedding_groups_are_ordered_by_lowest_rank_whatever_a_callable_chooses() -> None:
    def last_stage_of_even_pipelines(pipeline: list[int]) -> list[int]:
        return pipeline[:1] if pipeline[0] % 2 else pipeline[-1:]

    layout = ParallelLayout(world_size=4, pp=2, embedding_ranks=last_stage_of_even_pipelines)
    assert list(layout.partition("embd")) == [(1,), (2,)]


def test_default_embeddings_live_on_first_and_last_stage_and_positions_on_the_first() -> None:
    layout = ParallelLayout(world_size=6, pp=3)
    assert list(layout.partition("embd")) == [(0, 4), (1, 5)]
    assert list(layout.partition("pos_embd")) == [(0,), (1,)]
    assert layout.members("embd", 2) == ()


# Coordinates --------------------------------------------------------------------------------------

# family -> the coordinates in which ranks of one group may differ; all others are equal.
DENSE_FREEDOM = {
    "tp": {"tp"},
    "cp": {"cp"},
    "dp": {"dp"},
    "pp": {"pp"},
    "mp": {"tp", "pp"},
    "tp_cp": {"tp", "cp"},
    "dp_cp": {"dp", "cp"},
    "tp_dp": {"tp", "dp"},
    "tp_dp_cp": {"tp", "dp", "cp"},
    "gtp_remat": set(),
}
EXPERT_FREEDOM = {
    "expt_tp": {"expt_tp"},
    "ep": {"ep"},
    "expt_dp": {"expt_dp"},
    "tp_ep": {"expt_tp", "ep"},
    "tp_ep_pp": {"expt_tp", "ep", "pp"},
    "expt_gtp_remat": set(),
}
DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("expt_tp", "ep", "expt_dp", "pp")


def assert_grouped_by_coordinates(
    layout: ParallelLayout, freedom: dict[str, set[str]], axes: Sequence[str]
) -> None:
    where = {rank: layout.coordinates(rank) for rank in layout.ranks}
    for family, free in freedom.items():
        groups = {rank: layout.members(family, rank) for rank in layout.ranks}
        for one, other in combinations(layout.ranks, 2):
            differing = {
                axis for axis in axes if getattr(where[one], axis) != getattr(where[other], axis)
            }
            assert (other in groups[one]) == (differing <= free), (family, one, other)


@EACH_RICH_LAYOUT
def test_ranks_share_a_group_iff_they_differ_only_in_its_axes(layout: ParallelLayout) -> None:
    assert_grouped_by_coordinates(layout, DENSE_FREEDOM, DENSE_AXES)
    assert_grouped_by_coordinates(layout, EXPERT_FREEDOM, EXPERT_AXES)


@EACH_RICH_LAYOUT
def test_coordinate_is_the_index_in_the_group_of_its_axis(layout: ParallelLayout) -> None:
    for rank in layout.ranks:
        at = dataclasses.asdict(layout.coordinates(rank))
        assert at == {axis: layout.members(axis, rank).index(rank) for axis in at}


def test_optimizer_instances_slice_expert_data_parallelism() -> None:
    layout = ParallelLayout(world_size=8, ep=2, optimizer_instances=2)
    assert list(layout.partition("expt_dp")) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert list(layout.partition("intra_expt_dp")) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(layout.partition("inter_dist_opt")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(layout.partition("intra_dist_opt")) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert list(layout.partition("intra_dp_cp")) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_hierarchical_cp_has_neighbours_on_the_first_level() -> None:
    layout = ParallelLayout(world_size=8, cp=8, hierarchical_cp=(2, 4))
    assert list(layout.partition("hcp.0")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(layout.partition("hcp.1")) == [(0, 2, 4, 6), (1, 3, 5, 7)]


# Equality and fingerprint -------------------------------------------------------------------------

PLAIN = {"world_size": 16, "tp": 2, "pp": 2, "cp": 2, "ep": 2}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"order": "TP-CP-EP-DP-PP"}),
        ({}, {"expt_tp": 2}),
        *(({}, {"ranks": ranks}) for ranks in (range(16), tuple(range(16)), list(range(16)))),
        ({}, {"hierarchical_cp": None}),
        ({"ranks": range(0, 32, 2)}, {"ranks": tuple(range(0, 32, 2))}),
        ({"ranks": (*range(15), 20)}, {"ranks": [*range(15), 20]}),
        ({"world_size": 1, "ranks": range(4, 5)}, {"world_size": 1, "ranks": range(4, 6, 2)}),
    ],
)
def test_layouts_built_differently_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    sizes = {} if "world_size" in one else PLAIN
    first, second = ParallelLayout(**sizes | one), ParallelLayout(**sizes | other)
    assert first == second
    assert hash(first) == hash(second)
    assert first.fingerprint() == second.fingerprint()


def first_stage(pipeline: list[int]) -> list[int]:
    return pipeline[:1]


DIFFERENT: dict[str, dict[str, Any]] = {
    "world_size": {"world_size": 32},
    "tp": {"tp": 4, "expt_tp": 2},
    "pp": {"pp": 4},
    "cp": {"cp": 1},
    "ep": {"ep": 4},
    "expt_tp": {"expt_tp": 1},
    "gtp_remat": {"gtp_remat": 2},
    "expt_gtp_remat": {"expt_gtp_remat": 2},
    "order": {"order": "cp-tp-ep-dp-pp"},
    "optimizer_instances": {"optimizer_instances": 2},
    "hierarchical_cp": {"hierarchical_cp": (2,)},
    "embedding_ranks": {"embedding_ranks": first_stage},
    "position_embedding_ranks": {"position_embedding_ranks": lambda pipeline: pipeline[-1:]},
    "vpp": {"vpp": 2},
    "hybrid_cp": {"hybrid_cp": True},
    "ranks": {"ranks": range(1, 17)},
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ParallelLayout)])
def test_fingerprint_tells_layouts_apart_by_each_field(name: str) -> None:
    one, other = ParallelLayout(**PLAIN), ParallelLayout(**PLAIN | DIFFERENT[name])
    assert one != other
    assert one.fingerprint() != other.fingerprint()
    assert one.describe()[name] != other.describe()[name]


def test_fingerprint_is_the_same_in_another_process() -> None:
    """String hashes are salted per process, so they must not affect the fingerprint."""
    make = (
        "ParallelLayout(world_size=16, tp=2, pp=2, vpp=2, cp=2, hierarchical_cp=(2,), "
        "ranks=(*range(15), 20), embedding_ranks=lambda pipeline: pipeline[:1])"
    )
    code = f"from megapg.layout import ParallelLayout; print({make}.fingerprint())"
    here = eval(make, {"ParallelLayout": ParallelLayout, "range": range}).fingerprint()
    assert re.fullmatch(r"[0-9a-f]{64}", here)
    assert [run_python(code, PYTHONHASHSEED=seed) for seed in ("1", "2")] == [here, here]


def run_python(code: str, **environment: str) -> str:
    command = [sys.executable, "-c", code]
    ran = captured(command, env={**os.environ, **environment}, check=True)
    return ran.stdout.strip()


EmbeddingRanks = Callable[[list[int]], list[int]]


@pytest.mark.parametrize("name", ["embedding_ranks", "position_embedding_ranks"])
def test_embedding_callables_that_choose_the_same_have_one_fingerprint(name: str) -> None:
    """A callable counts by its results, because ranks never share the function object."""

    def layout(choose: EmbeddingRanks) -> ParallelLayout:
        return ParallelLayout(**PLAIN, **{name: choose})

    one = layout(lambda pipeline: [pipeline[0], pipeline[1]]).fingerprint()
    assert layout(lambda pipeline: pipeline).fingerprint() == one
    assert layout(lambda pipeline: pipeline[::-1]).fingerprint() == one
    assert layout(lambda pipeline: pipeline[1:]).fingerprint() != one


def test_embedding_callable_may_answer_in_integers_of_another_library() -> None:
    class Scalar:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    layout = ParallelLayout(
        world_size=4, pp=2, embedding_ranks=lambda pipeline: [Scalar(r) for r in pipeline]
    )
    plain = ParallelLayout(world_size=4, pp=2, embedding_ranks=lambda pipeline: pipeline)
    assert list(layout.partition("embd")) == [(0, 2), (1, 3)]
    assert layout.fingerprint() == plain.fingerprint()


def test_layout_is_frozen() -> None:
    layout = ParallelLayout(**PLAIN)
    for name in DIFFERENT:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(layout, name, getattr(layout, name))


def test_layout_is_hashable_also_after_it_was_asked() -> None:
    layout = ParallelLayout(**PLAIN, optimizer_instances=2, ranks=[*range(15), 20])
    before = hash(layout)
    for family in layout.families:
        layout.members(family, 20)
    assert hash(layout) == before
    assert {layout: 1}[ParallelLayout(**PLAIN, optimizer_instances=2, ranks=(*range(15), 20))] == 1


# Cost ---------------------------------------------------------------------------------------------


LARGE_SETTINGS = {**LARGE, "optimizer_instances": 2, "hierarchical_cp": (2, 2)}


@pytest.mark.parametrize("family", ParallelLayout(**LARGE_SETTINGS).families)
def test_a_group_of_a_large_layout_takes_memory_for_its_own_ranks(family: str) -> None:
    layout = ParallelLayout(**LARGE_SETTINGS)
    layout.members(family, 0)  # fills the caches of the layout
    tracemalloc.start()
    try:
        group = layout.members(family, 70_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * layout.world_size / 10 + 200 * len(group)


def test_importing_the_layout_works_where_torch_is_not_installed() -> None:
    code = "import sys; sys.modules['torch'] = None; import megapg.layout as m; print(m.AXES[0])"
    assert run_python(code) == "tp"


def test_hybrid_groups_are_neighbours_in_data_and_context_parallelism():
    layout = ParallelLayout(world_size=24, tp=2, cp=2, hybrid_cp=True)  # 12 ranks of dp x cp
    assert layout.members("dp_cp", 5) == (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23)
    assert layout.hybrid_cp_sizes == (2, 4)
    assert layout.members("hybrid.2", 5) == (5, 7)
    assert layout.members("hybrid.4", 5) == (1, 3, 5, 7)
    assert list(layout.partition("hybrid.4"))[:2] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    uneven = ParallelLayout(world_size=10, hybrid_cp=True)
    assert list(uneven.partition("hybrid.4")) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    with pytest.raises(
        UnknownFieldError, match=r"hybrid\.8: the sizes of hybrid groups here are 2, 4"
    ):
        layout.members("hybrid.8", 5)
    with pytest.raises(UnknownFieldError, match="they take hybrid_cp=True"):
        ParallelLayout(world_size=8).members("hybrid.2", 0)
    with pytest.raises(
        LayoutError, match=r"hybrid_cp with dp x cp = 3 x 1: .* even number of ranks"
    ):
        ParallelLayout(world_size=6, tp=2, hybrid_cp=True)
    assert layout.fingerprint() != ParallelLayout(world_size=24, tp=2, cp=2).fingerprint()


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(world_size=64, tp=2, pp=4, ep=4),
        ParallelLayout(world_size=48, tp=2, pp=2, order="tp-dp-cp-ep-pp", ranks=range(47, -1, -1)),
        ParallelLayout(world_size=32, cp=4, tp=2, optimizer_instances=2, hybrid_cp=True),
        ParallelLayout(world_size=16, tp=2, pp=4, embedding_ranks=lambda pipeline: pipeline[1:]),
    ],
)
def test_the_number_of_a_group_is_its_place_in_the_partition(layout):
    for field in layout.families:
        groups = [*layout.partition(field)]
        assert [*layout.first_ranks(field)] == [group[0] for group in groups]
        for rank in layout.ranks:
            number = layout.group_number(field, rank)
            assert layout.members(field, rank) == (() if number is None else groups[number])
        if layout.is_regular(field):
            assert len({tuple(r - group[0] for r in group) for group in groups}) == 1


def test_a_notebook_shows_the_groups_as_a_table() -> None:
    table = ParallelLayout(world_size=32, tp=2, pp=2)._repr_html_()
    assert "<caption>32 ranks</caption>" in table
    assert "<tr><td>pp, embd</td><td>16</td><td>0, 16</td></tr>" in table
    assert "<td>0, 1, ... 15</td>" in table  # tp_dp
