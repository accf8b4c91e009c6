"""The collection as a value: frozen, clear about missing groups, safe to hold in a model."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.distributed as dist

from megapg.collection import OPTIONAL_FIELDS, Lease, LeaseState
from megapg.collection import ProcessGroupCollection as Collection
from megapg.errors import (
    ForeignGroupError,
    LayoutError,
    MissingGroupError,
    SessionError,
    StaleGroupError,
    UnknownFieldError,
)
from megapg.layout import FIELDS, ParallelLayout
from megapg.megatron import parallel_state, published
from megapg.testing import fake_collection, refuse_closed_groups


@pytest.fixture
def pg():
    with fake_collection(tp=2, pp=2, cp=2, ep=2, world_size=16, rank=5) as collection:
        yield collection


def test_plain_values_agree_with_torch_and_with_the_layout(pg):
    for field in pg.present():
        group = getattr(pg, field)
        if group is None:
            assert field in OPTIONAL_FIELDS
            continue
        assert pg.size(field) == group.size() == dist.get_world_size(group)
        assert pg.rank(field) == group.rank() == dist.get_rank(group)
        assert pg.ranks(field) == tuple(dist.get_process_group_ranks(group))
        assert pg.ranks(field) == pg.layout.members(field, 5)


def test_a_session_makes_every_field(pg):
    assert set(pg.present()) == set(FIELDS) == set(vars(pg))
    assert {each.name for each in dataclasses.fields(Collection)} == {*FIELDS}


def test_fields_are_frozen(pg):
    with pytest.raises(dataclasses.FrozenInstanceError):
        pg.tp = pg.pp
    with pytest.raises(dataclasses.FrozenInstanceError):
        del pg.tp
    with pytest.raises(dataclasses.FrozenInstanceError):
        pg.anything = 1


def test_an_absent_field_is_absent_by_every_test_a_core_makes(pg):
    part = Collection.from_groups(tp=pg.tp, embd=None)
    assert hasattr(part, "tp")
    assert hasattr(part, "embd")
    assert not hasattr(part, "dp")
    assert set(vars(part)) == {"tp", "embd"}
    assert getattr(part, "dp", "nothing") == "nothing"
    with pytest.raises(MissingGroupError, match=r"no dp; it has tp, embd.*from_groups\(dp="):
        _ = part.dp
    with pytest.raises(AttributeError, match="no attribute 'tensor'"):
        _ = part.tensor


def test_asking_for_values_of_what_is_not_there(pg):
    part = Collection.from_groups(tp=pg.tp, embd=None)
    with pytest.raises(MissingGroupError, match="no dp"):
        part.size("dp")
    with pytest.raises(MissingGroupError, match="embd is None here"):
        part.rank("embd")
    with pytest.raises(UnknownFieldError, match="'tensor' is no field"):
        part.ranks("tensor")
    with pytest.raises(UnknownFieldError, match="'dp_cpp' is no field; did you mean 'dp_cp'"):
        part.ranks("dp_cpp")


def test_none_is_refused_where_torch_would_take_it_for_world(pg):
    with pytest.raises(ForeignGroupError, match="torch takes None for WORLD"):
        Collection.from_groups(dp=None)
    for field in OPTIONAL_FIELDS:
        assert getattr(Collection.from_groups(**{field: None}), field) is None


def test_boundaries_without_named_fields_check_every_group(pg):
    group = dist.new_group([4, 5])
    part = Collection.from_groups(tp=group)
    part.require()
    dist.destroy_process_group(group)
    with pytest.raises(ForeignGroupError, match=r"tp: .* destroyed"):
        part.require()
    with pytest.raises(ForeignGroupError, match="hcp: None is no process group"):
        Collection.from_groups(hcp=[None])


def test_what_is_no_live_group_of_this_rank_is_refused(pg):
    with pytest.raises(ForeignGroupError, match="non-member mark"):
        Collection.from_groups(tp=dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ForeignGroupError, match="no process group"):
        Collection.from_groups(tp="tp")
    with pytest.raises(UnknownFieldError, match="'tensor' is no field"):
        Collection.from_groups(tensor=pg.tp)
    gone = dist.new_group([4, 5])
    dist.destroy_process_group(gone)
    with pytest.raises(ForeignGroupError, match="does not know"):
        Collection.from_groups(tp=gone)


def test_equality_and_hash_go_by_the_groups(pg):
    same = Collection.from_groups(tp=pg.tp, dp=pg.dp)
    assert same == Collection.from_groups(dp=pg.dp, tp=pg.tp)
    assert hash(same) == hash(Collection.from_groups(dp=pg.dp, tp=pg.tp))
    assert same != Collection.from_groups(tp=pg.tp)
    assert same != Collection.from_groups(tp=pg.dp, dp=pg.tp)
    assert same != Collection.from_groups(tp=pg.tp, dp=pg.dp, embd=None)
    assert same != "tp"


def test_copies_are_the_same_object_so_models_can_be_copied(pg):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pg_collection = pg
            self.weight = torch.nn.Parameter(torch.ones(2))

    twin = copy.deepcopy(Layer())
    assert twin.pg_collection is pg
    assert copy.copy(pg) is pg


def test_pickling_says_what_to_send_instead(pg):
    with pytest.raises(TypeError, match=r"pg\.describe\(\)"):
        pickle.dumps(pg)
    plain = pg.describe()
    assert pickle.loads(pickle.dumps(plain)) == plain
    assert plain["tp"] == [4, 5]
    assert plain["hcp"] is None


def test_asdict_is_torchs_error_and_describe_is_the_way(pg):
    @dataclasses.dataclass
    class Config:
        hidden: int
        pg_collection: object

    with pytest.raises(TypeError):
        dataclasses.asdict(Config(8, pg))
    assert set(pg.describe()) == set(pg.present())


def test_torch_compile_sees_through(pg):
    def scale(x, collection):
        return x * collection.size("tp") + collection.rank("tp") if hasattr(collection, "tp") else x

    compiled = torch.compile(scale, fullgraph=True, backend="eager")
    x = torch.ones(3)
    assert torch.equal(compiled(x, pg), scale(x, pg))


def test_repr_reads_by_communicator(pg):
    text = repr(Collection.from_groups(tp=pg.tp, expt_tp=pg.tp, dp=pg.dp, embd=None))
    assert text == (
        "<ProcessGroupCollection: tp expt_tp = rank 1 of 2; dp = rank 1 of 2; embd = None>"
    )


def test_hierarchical_levels():
    layout = {"cp": 4, "hierarchical_cp": (2, 2), "tp": 2, "world_size": 16}
    with fake_collection(rank=3, **layout) as pg:
        assert isinstance(pg.hcp, tuple)
        assert [group.size() for group in pg.hcp] == [2, 2]
        assert pg.ranks("hcp.0") == (1, 3)
        assert pg.ranks("hcp.1") == (3, 7)
        assert pg.describe()["hcp"] == [[1, 3], [3, 7]]
        with pytest.raises(MissingGroupError, match=r"hcp\.0"):
            pg.rank("hcp")
        assert Collection.from_groups(hcp=list(pg.hcp)).ranks("hcp.1") == (3, 7)


def test_require_names_everything_that_is_missing(pg):
    part = Collection.from_groups(tp=pg.tp, embd=None)
    assert part.require("tp", "embd") is part
    with pytest.raises(MissingGroupError, match=r"save: .* no dp, dp_cp; it has tp, embd"):
        part.require("tp", "dp", "dp_cp", owner="save")


def test_the_lease_is_outside_equality(pg):
    groups = {"tp": pg.tp}
    members = Collection.from_groups(tp=pg.tp)._members
    live = Collection(groups, members, Lease("a"))
    over = Collection(groups, members, Lease("b", state=LeaseState.CLOSED, since="at noon"))
    assert live == over
    assert hash(live) == hash(over)
    with pytest.raises(StaleGroupError, match=r"of b .* were closed at noon"):
        over.require("tp")


def test_a_closed_session_ends_the_lease_and_strict_tests_see_the_use():
    with fake_collection(tp=2) as pg:
        dist.all_reduce(torch.ones(1), group=pg.tp)
        group = pg.tp
    with pytest.raises(StaleGroupError, match="closed at"):
        pg.require("tp")
    assert "closed" in repr(pg)
    ask = dist.distributed_c10d._rank_not_in_group
    with fake_collection(tp=2), refuse_closed_groups():
        with pytest.raises(StaleGroupError, match="destroyed process group"):
            dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(1))
    assert dist.distributed_c10d._rank_not_in_group is ask


@pytest.mark.contract
def test_every_field_of_a_closed_session_raises():
    with fake_collection(tp=2, gloo=("dp_cp",)) as pg:
        known = (repr(pg), hash(pg), pg.describe(), pg.present(), pg.ranks("tp"), pg.size("dp"))
        holder = {pg: copy.deepcopy(pg)}
    for field in (*FIELDS, "extras"):
        for read in (getattr, hasattr):  # hasattr must not hide it
            with pytest.raises(
                StaleGroupError, match=rf"pg.{field}: .*fake_collection.* were closed at"
            ):
                read(pg, field)
    assert not issubclass(StaleGroupError, AttributeError)
    now = (repr(pg), hash(pg), pg.describe(), pg.present(), pg.ranks("tp"), pg.size("dp"))
    assert now == (known[0].replace(":", " closed:", 1), *known[1:])
    assert {*vars(pg)} == {*pg.present()}  # the newest Megatron-core tests presence with vars()
    assert holder[pg] is pg is copy.copy(pg)
    assert isinstance(pg, Collection)
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(pg)


def test_a_compiled_function_notices_a_closed_session():
    def answer(x):
        return x + pg.tp.rank()

    with fake_collection(tp=2, rank=1) as pg:
        whole, parts = (torch.compile(answer, backend="eager", fullgraph=f) for f in (True, False))
        assert whole(torch.zeros(1)) == parts(torch.zeros(1)) == 1
    for run in (whole, parts):  # torch can't trace the check: it runs in Python, or is refused
        with pytest.raises((StaleGroupError, torch._dynamo.exc.Unsupported)):
            run(torch.zeros(1))


def test_fake_collection_refuses_what_it_cannot_play():
    with pytest.raises(LayoutError, match="rank 7 is not in this layout"), fake_collection(rank=7):
        pass
    for more, wanted in (({"rank": 1}, 2), ({"tp": 8}, 8)):
        with (
            fake_collection(tp=2),
            pytest.raises(SessionError, match=f"the first one world_size={wanted}"),
            fake_collection(tp=more.pop("tp", 2), **more),
        ):
            pass
    assert not dist.is_initialized()


@pytest.mark.contract
def test_two_fake_layouts_in_one_process():
    with fake_collection(rank=3, tp=2, pp=2) as actor:
        with fake_collection(rank=3, tp=4) as critic:
            assert (actor.ranks("tp"), critic.ranks("tp")) == ((2, 3), (0, 1, 2, 3))
            assert actor.tp.size() == 2
            assert critic.tp.size() == 4
            with published(critic), fake_collection(rank=3, pp=4) as third:
                assert parallel_state.get_tensor_model_parallel_group() is critic.tp
                assert third.rank("pp") == 3
        with pytest.raises(StaleGroupError, match=r"fake_collection\(\) 2"):
            _ = critic.tp
        assert actor.require("tp").rank("pp") == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("sizes", "world_size"),
    [
        ({"tp": 2, "ep": 3, "expt_tp": 1}, 6),
        ({"ep": 2, "optimizer_instances": 2}, 4),
        ({"cp": 2, "optimizer_instances": 2}, 2),  # the instances divide dp x cp of the dense grid
        ({"cp": 2, "tp": 2, "expt_tp": 1, "ep": 3, "optimizer_instances": 2}, 12),
        ({"pp": 2, "tp": 2, "optimizer_instances": 3}, 12),
    ],
)
def test_fake_collection_picks_the_smallest_world(sizes, world_size):
    with fake_collection(**sizes) as pg:
        assert pg.layout.world_size == world_size
    for smaller in range(1, world_size):
        with pytest.raises(LayoutError):
            ParallelLayout(world_size=smaller, **sizes)
