"""Sessions on real gloo ranks: created groups, shared groups, and residue."""

import gc
import logging
import os
import re
import threading
import time
from datetime import timedelta
from functools import partial
from unittest import mock

import freezing
import psutil
import pytest
import torch
import torch.distributed as dist
from asking import registered
from ports import free_port
from steps import Steps

import megapg
from megapg import torch_private
from megapg.errors import (
    LayoutMismatchError,
    MissingGroupError,
    RendezvousError,
    SessionError,
    StaleGroupError,
)
from megapg.layout import ParallelLayout
from megapg.rendezvous import store as megapg_store
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.testing import run_distributed

pytestmark = pytest.mark.torch

lists_keys = pytest.mark.skipif(
    not torch_private.lists_keys(dist.HashStore()), reason="this torch's stores list no keys"
)

LAYOUTS = {
    4: [{"tp": 2, "pp": 2}, {"ep": 2, "cp": 2}, {"optimizer_instances": 2}],
    8: [
        {"tp": 2, "pp": 2, "ep": 2},
        {"tp": 2, "ep": 4, "expt_tp": 1, "pp": 2, "vpp": 2},
        {"cp": 4, "hierarchical_cp": (2, 2), "tp": 2, "order": "tp-cp-ep-dp-pp"},
        {"optimizer_instances": 2, "ep": 2, "tp": 2, "order": "tp-ep-dp-pp-cp"},
    ],
}


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def groups_by_field(pg):
    found = {}
    for field in pg.present():
        value = getattr(pg, field)
        levels = (
            {f"{field}.{i}": g for i, g in enumerate(value)} if field == "hcp" and value else {}
        )
        found.update(levels or ({field: value} if value is not None else {}))
    return found


def every_field_sums_its_members(layouts):
    me = int(os.environ["RANK"])
    for sizes in layouts:
        with megapg.session(**sizes, timeout=30) as session:
            groups = groups_by_field(session.groups)
            assert set(groups) >= set(session.layout.families) - {
                "gtp_remat",
                "expt_gtp_remat",
                "dp_cp_ag",
                "expt_dp_ag",
                "embd",
                "pos_embd",
            }
            for field in session.layout.families:
                if field not in groups:
                    continue
                members = session.layout.members(field, me)
                total = torch.tensor([float(me)])
                dist.all_reduce(total, group=groups[field])
                assert total.item() == sum(members), (sizes, field)
                assert dist.get_process_group_ranks(groups[field]) == list(members)
            # There is one communicator per distinct rank set, and none is WORLD.
            distinct = {tuple(dist.get_process_group_ranks(g)) for g in groups.values()}
            assert len({id(g) for g in groups.values()}) == len(distinct)
            assert dist.group.WORLD not in groups.values()
            assert registered() == len(distinct) + 1
            del groups
        assert not dist.is_initialized()
    return True


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_field_reduces_over_exactly_its_members(world_size):
    work = partial(every_field_sums_its_members, LAYOUTS[world_size])
    assert run_distributed(work, world_size) == [True] * world_size


def extras_sum_their_members():
    me = int(os.environ["RANK"])
    asked = ("dp_cp", "expt_dp", "embd")
    with megapg.session(pp=2, hybrid_cp=True, gloo=asked, timeout=30) as session:
        pg = session.groups
        assert list(pg.extras) == ["hybrid.2", "gloo.dp_cp", "gloo.expt_dp", "gloo.embd"]
        for name, group in pg.extras.items():
            members = session.layout.members(name.removeprefix("gloo."), me)
            total = torch.tensor([float(me)])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(members), name
            assert pg.ranks(name) == members
            assert pg.size(name) == len(members)
            assert members[pg.rank(name)] == me
        # no second communicator, because the backend is gloo anyway
        assert pg.extras["gloo.dp_cp"] is pg.dp_cp
        assert set(pg.extras).isdisjoint(vars(pg))
        del pg
    complaints = []
    with megapg.session(pp=2, timeout=30) as session:
        for name in ("gloo.dp_cp", "hybrid.2", "gloo.nothing"):
            with pytest.raises(MissingGroupError) as error:
                session.groups.ranks(name)
            complaints.append(str(error.value))
    for wrong in ("hcp", "dp_cpp", "inter_dist_opt"):
        with pytest.raises(megapg.MegapgError) as refused:
            megapg.session(cp=4, hierarchical_cp=(2, 2), gloo=(wrong,), timeout=30)
        complaints.append(str(refused.value))
    return complaints


def test_gloo_companions_and_hybrid_groups_come_on_request():
    for complaints in run_distributed(extras_sum_their_members, 8):
        companion, hybrid, nothing, levels, unknown, absent = complaints
        assert '(extras: none); open the session with gloo=("dp_cp",)' in companion
        assert "hybrid_cp=True" in hybrid
        assert 'gloo=("nothing",)' in nothing
        assert "hcp is several groups" in levels
        assert "'dp_cpp' is no field" in unknown
        assert "inter_dist_opt is not made here; that takes another layout" in absent


def however_the_ranks_find_each_other():
    from megapg.communicators import addresses

    def keys_about_addresses():
        with megapg.session(tp=2, timeout=30) as session:
            for group in groups_by_field(session.groups).values():
                total = torch.ones(1)
                dist.all_reduce(total, group=group)
                assert total.item() == dist.get_world_size(group)
            dist.barrier()
            known = dist.distributed_c10d._get_default_store().list_keys()
            dist.barrier()
        return sum("/address/" in key for key in known)

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    told_at_once = keys_about_addresses()
    addresses._LARGEST = 1  # as in a job whose groups are all too large for one message
    looked_up = keys_about_addresses()
    addresses._LARGEST = 64
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # wraps each group in another
    addresses._LARGEST = 64
    detailed = keys_about_addresses()
    dist.set_debug_level(dist.DebugLevel.OFF)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # set by the user: creation itself connects
    eager = keys_about_addresses()
    dist.destroy_process_group()
    return told_at_once, looked_up, detailed, eager


@lists_keys
@pytest.mark.smoke
def test_addresses_are_told_in_one_message_or_looked_up():
    # With tp=2 on four ranks, each rank is in groups of 2, 2 and 4 ranks.
    assert run_distributed(however_the_ranks_find_each_other, 4) == [(12, 0, 12, 0)] * 4


def addresses_late():
    """The store is slow, or fails, after all ranks have reported that they are ready."""
    me, get = int(os.environ["RANK"]), dist.PrefixStore.multi_get

    def slow(self, keys):
        if any(key.startswith("address/") for key in keys):
            time.sleep(3.0)
        return get(self, keys)

    megapg_store._ALONE = 0.1
    dist.PrefixStore.multi_get = slow
    with megapg.session(timeout=60):
        pass

    def gone(self, keys):
        if any(key.startswith("address/") for key in keys):
            raise RuntimeError("out of memory")  # this rank can still report that it failed
        return get(self, keys)

    dist.PrefixStore.multi_get = gone if me == 1 else get
    started = time.monotonic()
    if me == 1:
        with pytest.raises(RendezvousError, match=r"session 'default': the store .* is gone"):
            megapg.session(timeout=60)
    else:
        session = megapg.session(timeout=60)
        with pytest.raises(RendezvousError, match="rank 1") as caught:
            session.check()
        assert caught.value.missing == (1,)
        with pytest.raises(RendezvousError):
            session.close()
    assert time.monotonic() - started < 50
    assert not dist.is_initialized()
    dist.PrefixStore.multi_get = get
    with megapg.session(timeout=60) as session:
        assert session.check().ranks == (0, 1)
    return True


@lists_keys
def test_addresses_that_come_late_or_never():
    assert run_distributed(addresses_late, 2) == [True] * 2


def cycles(count, caller_has_world):
    if caller_has_world:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        dist.barrier()
    me = psutil.Process()

    def usage():
        return {
            "groups": registered(),
            "threads": me.num_threads(),
            "fds": me.num_fds(),
            "names": len(dist.distributed_c10d._world.pg_names),
        }

    seen = []
    for _ in range(count):
        with megapg.session(tp=2, pp=2, timeout=30) as session:
            for group in groups_by_field(session.groups).values():
                dist.all_reduce(torch.ones(1), group=group)
            del group, session
        seen.append(usage())
    if caller_has_world:
        dist.barrier()
        dist.destroy_process_group()
    return seen


def cycles_in_both_worlds(count):
    return [cycles(count, caller_has_world) for caller_has_world in (False, True)]


def test_fifty_cycles_leave_nothing():
    for both in run_distributed(partial(cycles_in_both_worlds, 50), 4, deadline=200):
        for caller_has_world, seen in enumerate(both):
            # The first cycle opens the connection to the store, which stays open by design.
            first, last = seen[1], seen[-1]
            assert last["groups"] == first["groups"] == caller_has_world
            assert last["names"] == first["names"]
            assert last["threads"] <= first["threads"]
            assert last["fds"] <= first["fds"] + 1, seen  # a socket may still be closing


def inside_a_callers_world():
    dist.init_process_group("gloo", timeout=timedelta(seconds=41))
    me = dist.get_rank()
    mine = dist.new_group([0, 1])
    before = (
        dist.group.WORLD,
        registered(),
        dict(os.environ),
        dist.distributed_c10d._world.group_count,
    )
    with megapg.session(tp=2, timeout=20) as session:
        assert not session.owns_world
        assert session.describe()["world_timeout"] == 41.0
        assert session.groups.tp._get_backend(torch.device("cpu")).options._timeout == timedelta(
            seconds=41
        )
        pg = session.groups
    after = (
        dist.group.WORLD,
        registered(),
        dict(os.environ),
        dist.distributed_c10d._world.group_count,
    )
    assert before == after
    total = torch.tensor([me + 1.0])
    dist.all_reduce(total)
    dist.all_reduce(total, group=mine)
    assert total.item() == 6.0
    with pytest.raises(StaleGroupError):
        pg.require("tp")
    dist.destroy_process_group()
    return True


def test_what_the_caller_opened_is_left_alone():
    assert run_distributed(inside_a_callers_world, 2) == [True, True]


def two_models_side_by_side():
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    half = range(2) if me < 2 else range(2, 4)
    with (
        megapg.session(tp=4, name="actor", timeout=20) as actor,
        megapg.session(pp=4, name="critic", timeout=20) as critic,
        megapg.session(tp=2, name="reward", ranks=half, timeout=20) as reward,
    ):
        assert actor.groups.ranks("tp") == critic.groups.ranks("pp") == (0, 1, 2, 3)
        assert actor.groups.tp is not critic.groups.pp
        assert reward.groups.ranks("tp") == tuple(half)
        total = torch.tensor([float(me)])
        dist.all_reduce(total, group=reward.groups.tp)
        assert total.item() == sum(half)
        dist.all_reduce(total, group=actor.groups.tp)
        dist.all_reduce(total, group=critic.groups.pp)
    if me == 3:  # a rank outside the layout does nothing
        assert registered() == 1
        return True
    with megapg.session(tp=3, ranks=range(3), timeout=20) as three:
        total = torch.tensor([float(me)])
        dist.all_reduce(total, group=three.groups.tp)
        assert total.item() == 3.0
    return True


def test_several_layouts_in_one_process_and_on_part_of_the_world():
    assert run_distributed(two_models_side_by_side, 4) == [True] * 4


def sharing_options():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    with megapg.session(
        tp=2, dedicated=("tp", "dp_cp"), all_gather_groups=True, timeout=20
    ) as session:
        pg = session.groups
        assert pg.tp is not pg.expt_tp
        assert pg.expt_tp is pg.tp_ep
        assert pg.dp_cp is not pg.dp
        assert pg.dp_cp_ag is pg.dp
        assert pg.expt_dp_ag is not None
        for group in groups_by_field(pg).values():
            dist.all_reduce(torch.ones(1), group=group)
    return True


def test_dedicated_fields_share_with_nobody():
    assert run_distributed(sharing_options, 2) == [True, True]


@pytest.mark.usefixtures("alone")
def test_a_single_process_needs_no_launcher(caplog):
    with caplog.at_level(logging.INFO, logger="megapg"), megapg.session() as session:
        assert session.owns_world
        total = torch.ones(1)
        dist.all_reduce(total, group=session.groups.tp)
        assert total.item() == 1.0
        assert session.describe()["communicators"] == {"+".join(sorted_fields(session)): [0]}
    assert "time out after 0:30:00 on this session's groups" in caplog.text
    assert not dist.is_initialized()
    session.close()  # closing twice has no effect
    with pytest.raises(SessionError, match="was closed at"):
        _ = session.groups


def sorted_fields(session):
    pg = session.groups
    return [f for f in session.layout.families if getattr(pg, f, None) is not None]


class Keeper(torch.nn.Module):
    def __init__(self, pg):
        super().__init__()
        self.tp_group, self.pg = pg.tp, pg


@pytest.mark.usefixtures("alone")
def test_live_references_name_the_holder_also_after_the_end():
    with megapg.session() as session:
        assert session.live_references() == []
        keeper = Keeper(session.groups)
        expected = [
            f"tp+pp+mp+...: a {__name__}.Keeper, as tp_group",
            f"the collection: a {__name__}.Keeper, as pg",
        ]
        assert session.live_references() == expected
    assert session.live_references() == expected
    del keeper
    gc.collect()
    assert session.live_references() == []


@pytest.mark.usefixtures("alone")
def test_a_closed_session_says_so():
    session = megapg.session(name="early")
    session.close()
    assert re.fullmatch(
        r"<Session 'early' generation \d+ closed at [\d:]+ on rank 0>", repr(session)
    )
    with pytest.raises(SessionError, match=r"session 'early' .* was closed"), session:
        raise AssertionError("the block must not run")


def closed_after_an_error():
    """Rank 0 waits for no other rank, and the others raise its error."""
    steps = Steps()
    session = megapg.session(tp=2, timeout=60)
    steps.together()
    if session.rank == 0:
        session.close(RuntimeError("a worker was lost"))
        steps.say("closed")
    else:
        steps.hear("closed", (0,))
        with pytest.raises(RendezvousError, match="rank 0: RuntimeError: a worker was lost"):
            session.close()
    steps.together()
    with megapg.session(tp=2, timeout=60) as again:
        dist.all_reduce(torch.ones(1), group=again.groups.tp)
    return session.closed


def test_a_close_after_an_error_waits_for_no_rank():
    assert run_distributed(closed_after_an_error, 2, deadline=120) == [True, True]


def slow_first_use():
    """Ranks 0 and 1 have closed before 2 and 3 first use a group that connects lazily."""
    steps = Steps()
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    me = dist.get_rank()
    session = megapg.session(tp=2, timeout=60)
    session._timeout = 4.0
    steps.together()
    if me >= 2:
        steps.hear("closed", (0, 1))
        dist.all_reduce(torch.ones(1), group=session.groups.tp)
    silent = r"rank 2: did not answer \(process \d+ on \S+\); rank 3: did not answer \(process"
    with pytest.raises(RendezvousError, match=silent) as late:
        session.close()
    steps.say("closed")
    assert late.value.missing == (2, 3)
    assert session.closed
    assert registered() == 1
    dist.barrier()
    with megapg.session(tp=4, timeout=20) as again:  # also clears leftover keys
        dist.all_reduce(torch.ones(1), group=again.groups.tp)
    if me == 0:
        keys = dist.distributed_c10d._get_default_store().list_keys()
        left = [key for key in keys if "megapg/default/" in key and "/hello/" not in key]
        assert left == [], left
    dist.barrier()
    return True


@lists_keys
def test_closing_early_does_not_pull_the_rug_from_slow_ranks():
    assert run_distributed(slow_first_use, 4) == [True] * 4


def interrupted():
    """Rank 1 does not call; Ctrl-C interrupts rank 0."""
    steps = Steps()
    if int(os.environ["RANK"]) == 1:
        steps.hear("interrupted", [0])
        return
    with freezing.interrupted(partial(freezing.inside, Rendezvous._until)):
        megapg.session(timeout=120)
    steps.say("interrupted")


def test_ctrl_c_is_felt_while_waiting():
    run_distributed(interrupted, 2)


def timeouts_by_field():
    def of(group):
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    named = {"pp": timedelta(seconds=11), "gloo.dp": timedelta(seconds=12)}
    named |= dict.fromkeys(("tp", "tp_cp"), timedelta(seconds=13)) | {"hcp": timedelta(seconds=14)}
    sizes = {"tp": 2, "pp": 2, "cp": 2, "hierarchical_cp": (2, 1), "gloo": ("dp", "dp_cp")}
    told = []
    with megapg.session(**sizes, collective_timeout=named, timeout=30) as session:
        pg = session.groups
        everywhere = session.describe()["world_timeout"]
        assert everywhere == of(dist.group.WORLD) == 1800  # torch's default
        assert [of(group) for group in pg.hcp] == [14, everywhere]  # the second group sends nothing
        assert (of(pg.pp), of(pg.tp), of(pg.tp_cp), of(pg.cp)) == (11, 13, 13, everywhere)
        # Fields share a group only if ranks and timeout are equal.
        assert pg.hcp[0] is not pg.cp
        assert pg.dp is pg.extras["gloo.dp"]  # groups of one rank, which send nothing
        assert of(pg.extras["gloo.dp_cp"]) == everywhere
        for group in groups_by_field(pg).values():
            dist.all_reduce(torch.ones(1), group=group)
        by_fields = session.describe()["collective_timeouts"]
        told.append({f: seconds for f, seconds in by_fields.items() if seconds != everywhere})
        session.suspend()
        session.resume()
        assert (of(session.groups.pp), of(session.groups.tp)) == (11, 13)
        del pg, group
    with pytest.raises(
        LayoutMismatchError, match=r"collective_timeout of pp is .*0:00:11"
    ) as caught:
        megapg.session(pp=2, collective_timeout={"pp": timedelta(seconds=11 + me_first())})
    told.append(sorted(caught.value.differences))
    return told


def me_first():
    return int(os.environ["RANK"]) == 0


def test_timeouts_of_fields():
    expected = [{"tp": 13.0, "pp": 11.0, "hcp.0": 14.0, "tp_cp": 13.0}]
    expected.append(["collective_timeout of pp"])
    assert run_distributed(timeouts_by_field, 8) == [expected] * 8


def where_rank_0_hosts_the_store(port):
    """Open a session again and again, without an agent's store."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    started, start = [], threading.Thread.start

    def counted(self):
        started.append(self.name)
        start(self)

    for expected in range(1, 11):
        with megapg.session(tp=2, timeout=7, collective_timeout=timedelta(seconds=99)) as session:
            assert session.generation == expected
            # The timeout of the start-up does not outlive the start-up.
            assert torch_private.default_store().timeout == timedelta(seconds=99)
            dist.all_reduce(torch.ones(1), group=session.groups.tp)
            started.clear()
            with mock.patch.object(threading.Thread, "start", counted):
                second = megapg.session(pp=2, name="second")
            second.close()
    return started


def test_reopening_where_rank_0_hosts_the_store():
    """One thread makes all calls of an opening to the store."""
    opened = run_distributed(partial(where_rank_0_hosts_the_store, free_port()), 2)
    assert opened == [["megapg store"]] * 2


def test_layout_and_sizes_exclude_each_other():
    with pytest.raises(SessionError, match="not both"):
        megapg.session(ParallelLayout(world_size=1), tp=1)
    assert not dist.is_initialized()
