"""Compare ParallelLayout with the groups that the installed Megatron-core makes, by family.

The oracle is ``initialize_model_parallel``, run on a fake WORLD with its group creations recorded
(see ``recording.py``). The tests do not repeat its arithmetic. But the generator of valid
configurations must know what upstream accepts, and the refusal tests check that knowledge.
``test_published.py`` and ``test_equivalence.py`` compare the getters.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megapg.errors import LayoutError
from megapg.layout import AXES, DEFAULT_ORDER, ParallelLayout

pytest.importorskip("megatron.core")

import torch.distributed as dist
from configurations import Configuration, every_stage, last_stage_first, middle_stage
from megatron.core import parallel_state
from recording import Recording, recorded_megatron

from megapg.megatron import tables
from megapg.upstream.mapping import RANK_GLOBALS

pytestmark = pytest.mark.contract

# Two parameters differ between the supported generations of Megatron-core.
ARGUMENTS = inspect.signature(parallel_state.initialize_model_parallel).parameters
HAS_GTP = "gtp_remat_size" in ARGUMENTS
# Until 0.17 initialize_model_parallel also makes the groups for all-gathers.
TWINS = {"create_all_gather_group": True} if "create_all_gather_group" in ARGUMENTS else {}
UPSTREAM_REFUSALS = (AssertionError, RuntimeError, KeyError, ValueError)

# Upstream's name of a group -> megapg's field. Gloo twins have an additional "_GLOO".
FIELD_OF_DESCRIPTION = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "MODEL_PARALLEL_GROUP": "mp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp_ag",
    "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp_gtp_remat",
    "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp_gtp_remat",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "GTP_WEIGHT_REMAT_GROUP": "gtp_remat",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp_with_egtp_remat",
    "EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "EXPERT_DATA_PARALLEL_GROUP_AG": "expt_dp_ag",
    "EXPERT_GTP_WEIGHT_REMAT_GROUP": "expt_gtp_remat",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra_expt_dp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_dist_opt",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    **{f"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L{i}": f"hcp.{i}" for i in range(8)},
}

# With rematerialisation: the data parallel ranks and the ranks that shard their weights. Upstream's
# collection has no field for this group, unless there is no context parallelism.
WITHOUT_FIELD = "DATA_PARALLEL_GROUP_WITH_GTP_REMAT"

# The names from the tables that this core has. test_shim.py checks that the tables are complete.
# Gloo twins are made with the groups of the same name.
HERE = vars(parallel_state)
GROUP_GLOBALS = {name: field for name, field in tables.GROUP_GLOBALS.items() if name in HERE}
RANKS_GLOBALS = {name: field for name, field in RANK_GLOBALS.items() if name in HERE}


# Families of 0.19 that 0.16 has no group for.
ONLY_WITH_GTP = {
    "gtp_remat",
    "expt_gtp_remat",
    "dp_cp_gtp_remat",
    "expt_dp_gtp_remat",
    "tp_ep_pp_with_egtp_remat",
}


# Configurations -----------------------------------------------------------------------------------


def last_stage_of_even_pipelines_first_of_odd(pipeline: list[int]) -> list[int]:
    return pipeline[:1] if pipeline[0] % 2 else pipeline[-1:]


EMBEDDINGS = (
    every_stage,
    last_stage_first,
    middle_stage,
    last_stage_of_even_pipelines_first_of_odd,
)


def divisors_of(number: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@st.composite
def factorisations_of(draw: st.DrawFn, number: int, count: int) -> tuple[int, ...]:
    """Draw ``count`` factors whose product is ``number``; some may be 1.

    Most primes go to a favourite factor, so that large factors occur too.
    """
    factors = [1] * count
    favourite = draw(st.integers(0, count - 1))
    places = st.sampled_from((*range(count), favourite, favourite))
    for prime in range(2, number + 1):
        while number % prime == 0:
            factors[draw(places)] *= prime
            number //= prime
    return tuple(factors)


def accepted_orders(dense: Mapping[str, int], expert: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the permutations of the axes that upstream accepts for these sizes."""

    def accepted(order: tuple[str, ...]) -> bool:
        before_pp = order[: order.index("pp")]
        same_pipelines = math.prod(dense[axis] for axis in before_pp) == math.prod(
            expert[axis] for axis in before_pp
        )
        return same_pipelines and (order[-1] == "pp" or dense["dp"] == expert["dp"])

    every = itertools.permutations(AXES)
    return list(every) if dense["pp"] == 1 else [order for order in every if accepted(order)]


@st.composite
def orders(draw: st.DrawFn, dense: Mapping[str, int], expert: Mapping[str, int]) -> str:
    """Draw an accepted order: permuted, in mixed case, perhaps without some axes of size 1."""
    accepted = accepted_orders(dense, expert)
    axes = draw(st.one_of(st.just(AXES), st.sampled_from(accepted)))
    can_go = [axis for axis in AXES if dense[axis] == expert[axis] == 1]
    if HAS_GTP:  # see test_tp_may_be_left_out_where_upstream_stumbles
        can_go = [axis for axis in can_go if axis != "tp"]
    if can_go and draw(st.booleans()):
        left_out = draw(st.sets(st.sampled_from(can_go)))
        axes = tuple(axis for axis in axes if axis not in left_out) or axes
    order = draw(st.sampled_from([str.lower, str.lower, str.upper, str.title]))("-".join(axes))
    # See test_upper_case_pp_is_last_where_upstream_overlooks_it.
    return order[:-2] + "pp" if axes[-1] == "pp" else order


def orders_with_gtp() -> st.SearchStrategy[str]:
    return st.permutations(AXES[:-1]).map(lambda axes: "-".join((*axes, "pp")))


WORLD_SIZES = st.sampled_from(
    (*range(1, 25), 8, 8, 12, 12, 16, 16, 16, 16, 18, 20, 24, 24, 24, 24, 24, 32, 36, 48)
)


@st.composite
def valid_configurations(draw: st.DrawFn) -> Configuration:
    """Draw the sizes as factors of the world size, so that no example is rejected."""
    world_size = draw(WORLD_SIZES)
    pp, tp, cp, whole_dp = draw(factorisations_of(world_size, 4))
    # The ranks that shard weights are taken from the replicas.
    remats = HAS_GTP and draw(st.integers(0, 3)) == 0
    gtp = draw(divisors_of(whole_dp)) if remats else 1
    dp = whole_dp // gtp
    # Only with equal data parallelism may pp come before the last place, so make that frequent.
    if draw(st.booleans()):
        expt_dp = whole_dp
        expt_tp, ep = draw(factorisations_of(tp * cp, 2))
    else:
        expt_tp, ep, expt_dp = draw(factorisations_of(world_size // pp, 3))
    egtp = draw(divisors_of(expt_dp)) if remats else 1
    expt_dp = world_size // pp // expt_tp // ep // egtp
    dense = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    expert = {"tp": expt_tp, "cp": 1, "ep": ep, "dp": expt_dp, "pp": pp}
    levels = draw(st.sampled_from((0, 1, 2, 2, 3)))
    embeddings = st.one_of(st.none(), st.sampled_from(EMBEDDINGS))
    return Configuration(
        world_size=world_size,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expt_tp=None if expt_tp == tp and draw(st.booleans()) else expt_tp,
        order=draw(orders(dense, expert)) if gtp == egtp == 1 else draw(orders_with_gtp()),
        optimizer_instances=draw(divisors_of(math.gcd(dp * cp, expt_dp))) if not remats else 1,
        hierarchical_cp=draw(factorisations_of(cp, levels)) if levels else (),
        embedding_ranks=draw(embeddings),
        position_embedding_ranks=draw(embeddings),
        vpp=draw(st.one_of(st.none(), st.integers(1, 4))) if pp > 1 else None,
        gtp_remat=gtp,
        expt_gtp_remat=egtp,
    )


@st.composite
def players(draw: st.DrawFn) -> tuple[Configuration, int]:
    """Draw a valid configuration and a rank to play."""
    configuration = draw(valid_configurations())
    return configuration, draw(st.integers(0, configuration.world_size - 1))


# Comparing ----------------------------------------------------------------------------------------


def assert_equals_megatron(configuration: Configuration, rank: int) -> None:
    """Run upstream as ``rank`` and compare every family, global and getter with the layout."""
    layout = configuration.layout()
    with recorded_megatron(rank, configuration.world_size) as recording:
        configuration.initialize_megatron(**TWINS)
        if not TWINS and stands_in_default_order(layout):
            dense, expert = parallel_state.create_all_gather_groups(for_expert_parallelism=True)
            assert ranks_of(dense) == layout.members("dp_cp_ag", rank)
            experts = layout.members("expt_dp_ag", rank) if layout.ep > 1 else None
            assert ranks_of(expert) == experts
        assert_globals_hold(layout, rank)
    partitions = assert_recorded_families_agree(layout, recording)
    # Fail if upstream makes a known family under a new name, as it would not be compared.
    assert set(partitions) - families_of(recording) == families_without_creation(layout)


def stands_in_default_order(layout: ParallelLayout) -> bool:
    # Upstream's create_all_gather_groups() uses the default order in any case. With another order
    # its groups differ from dp_cp, and megapg's do not, so there is nothing to compare. If weights
    # are sharded, it counts those ranks twice and uses ranks that do not exist.
    if layout.gtp_remat > 1 or layout.expt_gtp_remat > 1:
        return False
    sizes = {
        "tp": max(layout.tp, layout.expt_tp),
        "cp": layout.cp,
        "ep": layout.ep,
        "dp": max(layout.dp, layout.expt_dp),
        "pp": layout.pp,
    }
    axes = [axis for axis in layout.order.split("-") if sizes[axis] > 1]
    return axes == [axis for axis in AXES if axis in axes]


def family_of(description: str) -> str:
    return FIELD_OF_DESCRIPTION[description.replace("_GLOO", "")]


def families_of(recording: Recording) -> set[str]:
    return {family_of(description) for description in recording if description != WITHOUT_FIELD}


def assert_recorded_families_agree(
    layout: ParallelLayout, recording: Recording
) -> dict[str, list[tuple[int, ...]]]:
    partitions = {family: list(layout.partition(family)) for family in layout.families}
    for description, groups in recording.items():
        if description == WITHOUT_FIELD:
            assert layout.cp > 1 or partitions["dp_cp_gtp_remat"] == sorted(groups)
            continue
        # Compare lists: no group comes twice, and megapg's are ordered by lowest rank.
        assert partitions[family_of(description)] == sorted(groups), description
    return partitions


def families_without_creation(layout: ParallelLayout) -> set[str]:
    """Return families that upstream aliases or lacks; other checks cover the aliases."""
    silent = set()
    if layout.optimizer_instances == 1:
        silent |= {"intra_dp_cp", "intra_expt_dp"}
    if not HAS_GTP:
        silent |= ONLY_WITH_GTP
    if layout.gtp_remat == 1:
        silent |= {"dp_cp_gtp_remat"}
    if layout.expt_gtp_remat == 1:
        silent |= {"expt_dp_gtp_remat"}
    if not TWINS and not stands_in_default_order(layout):
        silent |= {"dp_cp_ag", "expt_dp_ag"}
    if TWINS or layout.ep == 1:
        silent |= {"expt_dp_ag"}
    return silent


def assert_globals_hold(layout: ParallelLayout, rank: int) -> None:
    state = vars(parallel_state)
    for name, field in tables.group_globals(layout).items():
        if name not in HERE or not field:
            continue
        assert ranks_of(state[name]) == expected(layout, field, rank), name
        if f"{name}_GLOO" in state and has_twin(layout, name):
            assert ranks_of(state[f"{name}_GLOO"]) == expected(layout, field, rank), f"{name}_GLOO"
    for name, field in RANKS_GLOBALS.items():
        held = state[name]
        assert (held and tuple(sorted(held))) == expected(layout, field, rank), name


def has_twin(layout: ParallelLayout, name: str) -> bool:
    """True if upstream can make gloo twins of the family: not if weights are sharded."""
    return layout.gtp_remat == 1 and not ("EXPERT" in name and layout.expt_gtp_remat > 1)


def expected(layout: ParallelLayout, field: str, rank: int) -> object:
    """Return the group that upstream should hold for ``field`` on ``rank``, or None."""
    if field == "hcp":
        levels = range(len(layout.hierarchical_cp))
        return [layout.members(f"hcp.{level}", rank) for level in levels] or None
    if field not in layout.families:
        return None
    return layout.members(field, rank) or None


def ranks_of(value: object) -> object:
    if value is None:
        return None
    if isinstance(value, list):
        return [ranks_of(group) for group in value]
    return tuple(dist.get_process_group_ranks(value))


def assert_members_belong_to_partition(layout: ParallelLayout) -> None:
    for family in layout.families:
        home = {rank: group for group in layout.partition(family) for rank in group}
        for rank in layout.ranks:
            assert layout.members(family, rank) == home.get(rank, ()), family


# The tests ----------------------------------------------------------------------------------------


def features_of(configuration: Configuration) -> dict[str, bool]:
    """Return the features of a configuration that the generator must reach."""
    layout = configuration.layout()
    axes = layout.order.split("-")
    return {
        "expert tp differs": layout.expt_tp != layout.tp,
        "expert dp differs": layout.expt_dp != layout.dp,
        "tp, cp, dp and pp at once": min(layout.tp, layout.cp, layout.dp, layout.pp) > 1,
        "instances": layout.optimizer_instances > 1,
        "instances within and across": 1 < layout.optimizer_instances < layout.expt_dp,
        "hierarchical cp": sum(level > 1 for level in layout.hierarchical_cp) > 1,
        "custom embedding": configuration.embedding_ranks is not None and layout.pp > 2,
        "virtual pipeline": layout.vpp is not None,
        "another order": not stands_in_default_order(layout),
        "pp not last": layout.pp > 1 and axes[-1] != "pp",
        "an axis left out": len(axes) < len(AXES),
        "upper case": configuration.order != layout.order,
        "a large world": layout.world_size > 24,
        "sharded weights": layout.gtp_remat > 1 or not HAS_GTP,
        "sharded weights of experts": layout.expt_gtp_remat > 1 or not HAS_GTP,
    }


# The few examples are the same in every run; the many are random.
FEW_AND_MANY = pytest.mark.parametrize(
    "examples", [120, pytest.param(1400, marks=pytest.mark.slow)]
)


@FEW_AND_MANY
def test_valid_configurations_make_the_groups_megatron_makes(examples: int) -> None:
    executed: set[tuple[Configuration, int]] = set()
    reached: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=examples < 1000)
    @given(players())
    @example((Configuration(world_size=16, tp=2, pp=2, cp=2, vpp=2), 5))
    @example((Configuration(world_size=48, tp=2, ep=3, expt_tp=1, optimizer_instances=2), 47))
    def holds(player: tuple[Configuration, int]) -> None:
        configuration, rank = player
        assert_equals_megatron(configuration, rank)
        assert_members_belong_to_partition(configuration.layout())
        if player not in executed:
            reached.update(features_of(configuration))
        executed.add(player)

    holds()
    assert len(executed) >= examples * 5 // 7
    # Without this check, the test would pass if the generator no longer reached a feature.
    assert examples < 1000 or min(reached.values()) >= 5, reached


@pytest.mark.skipif(not HAS_GTP, reason="this Megatron-core has no rank_offset")
@settings(max_examples=150, deadline=None)
@given(players(), st.integers(1, 9), st.integers(0, 5))
def test_sub_world_equals_megatron_with_rank_offset(
    player: tuple[Configuration, int], offset: int, above: int
) -> None:
    configuration, position = player
    rank = position + offset
    size = configuration.world_size
    layout = configuration.layout(ranks=range(offset, offset + size))
    with recorded_megatron(rank, offset + size + above) as recording:
        configuration.initialize_megatron(rank_offset=offset, local_world_size=size)
        assert_globals_hold(layout, rank)
    assert_recorded_families_agree(layout, recording)


# Refusals -----------------------------------------------------------------------------------------


def megatron_refuses(configuration: Configuration, rank: int = 0) -> bool:
    with recorded_megatron(rank, configuration.world_size):
        try:
            configuration.initialize_megatron()
        except UPSTREAM_REFUSALS:
            return True
    return False


def megapg_refuses(configuration: Configuration) -> bool:
    try:
        configuration.layout()
    except LayoutError:
        return True
    return False


@st.composite
def changed_configurations(draw: st.DrawFn) -> Configuration:
    """Draw a valid configuration with one value changed to any other, valid or not.

    Values on which megapg and upstream differ on purpose are left out. Each has its own test below.
    """
    configuration = draw(valid_configurations())
    configuration = replace(configuration, order=configuration.order.lower())
    axes = configuration.order.split("-")
    small = st.integers(1, 6)
    name = draw(
        st.sampled_from(
            [
                *("world_size", "tp", "pp", "cp", "ep", "expt_tp", "optimizer_instances", "vpp"),
                *(("gtp_remat", "expt_gtp_remat") if HAS_GTP else ()),
                *("hierarchical_cp", "shuffled", "shuffled", "axis left out", "unknown axis"),
            ]
        )
    )
    if name == "world_size":
        return replace(configuration, world_size=draw(st.integers(1, 24)))
    if name == "hierarchical_cp":
        return replace(configuration, hierarchical_cp=tuple(draw(st.lists(small, max_size=3))))
    if name == "shuffled":
        return replace(configuration, order="-".join(draw(st.permutations(axes))))
    if name == "axis left out":
        may_go = [axis for axis in axes if axis != "tp"] or axes
        axes.remove(draw(st.sampled_from(may_go)))
        return replace(configuration, order="-".join(axes))
    if name == "unknown axis":
        axes[draw(st.integers(0, len(axes) - 1))] = draw(st.sampled_from(("", "xp", "sp", "t")))
        return replace(configuration, order="-".join(axes))
    return replace(configuration, **{name: draw(small)})


@FEW_AND_MANY
def test_megapg_refuses_exactly_what_megatron_refuses(examples: int) -> None:
    verdicts: Counter[bool] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=examples < 1000)
    @given(changed_configurations())
    def agree(configuration: Configuration) -> None:
        refused = megatron_refuses(configuration)
        assert megapg_refuses(configuration) == refused
        verdicts[refused] += 1
        if not refused:
            assert_equals_megatron(configuration, configuration.world_size - 1)

    agree()
    assert min(verdicts[True], verdicts[False]) >= examples * 15 // 100, verdicts


@pytest.mark.parametrize(
    "configuration",
    [
        # The sizes of a doubled axis of size 1 happen to cancel out upstream.
        pytest.param(Configuration(world_size=4, tp=2, order="tp-cp-cp-dp-pp"), id="doubled-axis"),
        # Upstream only tests pp > 1, and would build a model without chunks.
        pytest.param(Configuration(world_size=4, pp=2, vpp=0), id="no-chunks"),
    ],
)
def test_only_megapg_refuses(configuration: Configuration) -> None:
    assert megapg_refuses(configuration)
    assert not megatron_refuses(configuration)


@pytest.mark.skipif(not HAS_GTP, reason="this Megatron-core has no gtp_remat axis")
def test_only_megapg_refuses_the_gtp_axis_it_does_not_have() -> None:
    configuration = Configuration(world_size=4, tp=2, order="tp-gtp_remat-cp-ep-dp-pp")
    assert megapg_refuses(configuration)
    assert not megatron_refuses(configuration)


EMBEDDING_FIELDS = pytest.mark.parametrize(
    ("field", "argument"), [("embd", "embedding_ranks"), ("pos_embd", "position_embedding_ranks")]
)


@EMBEDDING_FIELDS
@pytest.mark.parametrize("steps", [(1,), (0, 0)], ids=["outside", "doubled"])
def test_embedding_ranks_are_each_once_and_in_the_pipeline(
    field: str, argument: str, steps: tuple[int, ...]
) -> None:
    """Upstream makes a group with ranks outside; torch refuses doubled ranks since 2.7."""
    configuration = Configuration(
        world_size=4, pp=2, **{argument: lambda pipeline: [(pipeline[0] + n) % 4 for n in steps]}
    )
    layout = configuration.layout()  # a callable's result is not known before it is called
    for ask in (lambda: layout.members(field, 0), lambda: list(layout.partition(field))):
        with pytest.raises(LayoutError, match=f"{field}: the callable chose the ranks"):
            ask()


@EMBEDDING_FIELDS
def test_pipeline_without_embedding_is_refused_by_upstream_only(field: str, argument: str) -> None:
    """torch mistakes the empty group for WORLD and trips; megapg has no group to make."""
    configuration = Configuration(
        world_size=4, pp=2, **{argument: lambda pipeline: [r for r in pipeline if r % 2]}
    )
    # The type of the error depends on the release of torch.
    with pytest.raises((TypeError, AssertionError)), recorded_megatron(0, 4):
        configuration.initialize_megatron()
    layout = configuration.layout()
    assert list(layout.partition(field)) == [(1, 3)]
    assert [layout.members(field, rank) for rank in range(4)] == [(), (1, 3), (), (1, 3)]


def test_upper_case_pp_is_last_where_upstream_overlooks_it() -> None:
    """Upstream looks for a final "pp" before it lowers the case; the groups are the same."""
    lower = Configuration(world_size=8, pp=2, tp=2, ep=2, expt_tp=1, cp=2)
    upper = replace(lower, order=DEFAULT_ORDER.upper())
    assert megatron_refuses(upper)
    assert not megatron_refuses(lower)
    assert upper.layout() == lower.layout()


def test_tp_may_be_left_out_where_upstream_stumbles() -> None:
    """If the "tp" axis is left out, 0.19 finds "tp" in its own "gtp_remat" and fails."""
    configuration = Configuration(world_size=4, pp=2, order="dp-pp")
    assert megatron_refuses(configuration) == HAS_GTP
    assert list(configuration.layout().partition("tp")) == [(0,), (1,), (2,), (3,)]
