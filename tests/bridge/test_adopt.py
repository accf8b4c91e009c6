"""Tests of ``adopt()`` with real ranks, Megatron's real globals and torch's own registry."""

import contextlib
import gc
import inspect
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import dozing
import pytest
import torch
import torch.distributed as dist
from recording import fake_world
from stepwise import TEXT, build, distributed, step, weights
from torch.distributed import distributed_c10d as c10d

import megapg
from megapg.collection import LeaseState
from megapg.errors import (
    MissingGroupError,
    OffloadError,
    PublishedError,
    RendezvousError,
    SessionError,
    StaleGroupError,
    TeardownError,
    UnsupportedOffloadError,
)
from megapg.megatron import adopt, parallel_state, published, record_initialize
from megapg.megatron.adopting import creations as creations_of_core
from megapg.megatron.adopting.creations import Call
from megapg.megatron.adopting.variables import groups_held
from megapg.testing import megatron_on_cpu
from megapg.tools.demo.job import GPTRun

pytestmark = pytest.mark.contract

RUN = GPTRun(tp=2, pp=2, layers=4, hidden=32, seq_length=32, num_microbatches=2, steps=2)

on_four = partial(distributed, world_size=4, deadline=200)

initialise = parallel_state.initialize_model_parallel  # bound early, as in users' modules
alone = partial(initialise, create_gloo_process_groups=False)  # gloo would wait for the others


def state():
    """Return the module's variables, with copies of lists and dicts."""
    held = {n: v for n, v in vars(parallel_state).items() if n[0] == "_" and n[:2] != "__"}
    return {n: v.copy() if isinstance(v, (list, dict)) else v for n, v in held.items()}


FRESH = state()


def registry():
    return set(c10d._world.pg_map)


def resources():
    gc.collect()
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
    )


def settled(wanted, within=100.0):
    """Wait until threads and open files are as ``wanted``: gloo's threads end with a delay."""
    deadline = time.monotonic() + within
    while (now := resources()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def groups_by_variable():
    """Return the description, ranks and backend of the group in each variable."""
    return {
        name: (
            group.group_desc,
            dist.get_process_group_ranks(group),
            dist.get_backend_config(group),
        )
        for name, group in vars(parallel_state).items()
        if isinstance(group, dist.ProcessGroup)
    }


def total(group):
    value = torch.ones(())
    dist.all_reduce(value, group=group)
    return int(value)


def everyone():
    """Wait for all ranks, on WORLD."""
    dist.barrier()


@contextlib.contextmanager
def coming_late(late, to):
    """Run the block on rank ``late`` after the other ranks have left it."""
    store, others = c10d._get_default_store(), {*range(dist.get_world_size())} - {late}
    while dist.get_rank() == late and not store.check(
        [f"{to} without {late}: {r}" for r in others]
    ):
        time.sleep(0.05)
    yield
    store.set(f"{to} without {late}: {dist.get_rank()}", "")


@contextlib.contextmanager
def raises(kind, *words, missing=None):
    with pytest.raises(kind) as caught:
        yield
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    if isinstance(caught.value, ExceptionGroup):
        text += "\n".join(map(str, caught.value.exceptions))
    for word in words:
        assert word in text, text
    if missing is not None:
        assert caught.value.missing == missing


# -- in place of destroy_model_parallel ------------------------------------------------------------

LAYOUTS = [
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
    {"expert_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
    {"hybrid_context_parallel": True, "create_all_gather_group": True},
    {"tensor_model_parallel_size": 2, "create_gloo_process_groups": False},
]


def six_cycles():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    world, told = registry(), []
    everyone()
    for layout in LAYOUTS:
        known = inspect.signature(initialise).parameters
        initialise(**{name: value for name, value in layout.items() if name in known})
        made = registry() - world
        owner = adopt(timeout=60)
        groups = owner.groups
        assert {group for _, group in owner._made} == made
        assert groups.tp is parallel_state.get_tensor_model_parallel_group()
        assert groups.dp_cp is parallel_state.get_data_parallel_group(with_context_parallel=True)
        assert total(groups.tp) == groups.size("tp")
        if parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS:
            assert list(groups.hcp) == parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS
        hybrid = {name for name in groups.extras if name.startswith("hybrid.")}
        assert hybrid == {f"hybrid.{size}" for size in parallel_state._HYBRID_DP_CP_GROUPS}
        assert ("gloo.dp" in groups.extras) == layout.get("create_gloo_process_groups", True)
        assert owner.leftovers == ()
        assert parallel_state.get_global_memory_buffer() is not None
        owner.close()
        owner.close()
        assert registry() == world
        assert state() == FRESH
        with raises(StaleGroupError, "megatron.core.parallel_state, adopted"):
            groups.require("tp")
        with raises(StaleGroupError, "pg.tp: the process groups of megatron.core.parallel_state"):
            hasattr(groups, "tp")
        del made, groups, owner
        told.append(settled(told[0]) if told else resources())
    everyone()
    return len(told), set(told)


def test_six_cycles_leave_nothing_in_torch_in_the_globals_and_in_the_process():
    for cycles, seen in on_four(six_cycles):
        assert (cycles, len(seen)) == (6, 1), seen


# -- a model on the globals ------------------------------------------------------------------------


def steps_of(run, owner):
    """Train a GPT on the globals, step by step; the caller may suspend between steps."""
    job = build(run)
    for number in range(run.steps):
        yield step(run, number, job).hex()
        if owner is not None:
            yield owner.rebind(*job[:2])
    yield weights(job)


def train_through_suspensions():
    warnings.simplefilter("ignore")
    from megapg.tools.demo.gpt import train

    dist.init_process_group("gloo")
    with megatron_on_cpu(), record_initialize() as record:
        parallel_state.initialize_model_parallel(2, 2, create_gloo_process_groups=False)
        usual = train(RUN, TEXT, None)
        plain = [loss.hex() for loss in usual.losses] + [usual.weights_sha256]
        told, called = [], []
        with adopt(record, timeout=60) as owner:
            owner.before_release(lambda: called.append("release"))
            owner.on_resume(lambda groups: called.append(groups is owner.groups))
            passed = train(RUN, TEXT, owner.groups)
            assert (passed.losses, passed.weights_sha256) == (usual.losses, usual.weights_sha256)
            training = steps_of(RUN, owner)
            for _ in range(RUN.steps):
                told.append(next(training))
                before = groups_held(parallel_state)
                gone = owner.suspend()
                assert (gone.how, gone.groups_gone) == ("recreate", len(before))
                assert not registry() & set(before)
                assert not parallel_state.model_parallel_is_initialized()
                owner.resume()
                assert not set(before) & set(groups_held(parallel_state))
                del before
                rebound = next(training)
                assert rebound.complete, str(rebound)
            told.append(next(training))
            again = train(RUN, TEXT, None)
    assert called == ["release", True] * RUN.steps + ["release"]
    assert (again.losses, again.weights_sha256) == (usual.losses, usual.weights_sha256)
    assert state() == FRESH
    assert len(registry()) == 1
    return plain, told


def test_a_gpt_on_the_globals_trains_on_with_groups_that_were_made_anew():
    for plain, told in on_four(train_through_suspensions):
        assert told == plain
        assert len(set(plain)) == 3


# -- who owns the groups ---------------------------------------------------------------------------


def ownership():
    warnings.simplefilter("ignore")
    with raises(MissingGroupError, "holds no live group"):
        adopt()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), registry()
    with raises(MissingGroupError, "holds no live group", "initialize_model_parallel"):
        adopt(timeout=60)
    everyone()

    # destroy_model_parallel() keeps the groups and some of the globals.
    for _ in range(2):
        initialise(2, 2, context_parallel_size=1)
        parallel_state.destroy_model_parallel()
        everyone()
    stale = {name for name, value in state().items() if value != FRESH[name]}
    leaked = registry() - world
    assert len(leaked) >= 2 * 13
    assert len(stale) >= 5, stale
    with raises(MissingGroupError):
        adopt(timeout=60)
    everyone()

    with megapg.session(name="beside", pp=2, timeout=60) as session:
        before = registry()
        initialise(2, 2)
        made = registry() - before
        mine = dist.new_group(range(4), group_desc="the caller's own")
        with adopt(timeout=60) as owner:
            assert {group for _, group in owner._made} == made
            assert not owner.unknown  # torch shows every option of gloo
            names = {leftover.name for leftover in owner.leftovers}
            assert names == {group.group_name for group in leaked | {mine}}
            assert owner.leftovers[-1].description == "the caller's own"
            assert owner.leftovers[-1].ranks == (0, 1, 2, 3)
            assert "the caller's own" in str(owner.leftovers[-1])
            everyone()
            with raises(SessionError, "have an owner", "generation 1 live"):
                adopt(timeout=60)
            everyone()
            with published(session.groups):
                with raises(PublishedError, "leave that block first"):
                    owner.close()
                with raises(UnsupportedOffloadError, "leave that block first"):
                    owner.suspend()
                everyone()
                with raises(PublishedError):
                    adopt()
                everyone()
            assert owner.state is LeaseState.LIVE
            assert total(owner.groups.pp) == 2
        assert registry() == before | {mine}
        assert state() == FRESH
        assert total(session.groups.pp) == total(mine) / 2 == 2
        for group in c10d._world.pg_map:  # the same order on all ranks
            if group in leaked:
                total(group)  # not in the globals and not owned, so still usable

        # A session keeps its groups, even if other code stores them in the globals.
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = session.groups.tp
        with raises(SessionError, "session beside/1"):
            adopt(timeout=60)
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
        everyone()
    dist.destroy_process_group(mine)

    # Later groups belong to their maker, even after destroy_model_parallel() forgot the old ones.
    initialise(2, 2)
    first = adopt(timeout=60)
    ours = {group for _, group in first._made}
    parallel_state.destroy_model_parallel()
    initialise(1, 4)
    second = set(groups_held(parallel_state))
    assert not second & ours
    everyone()
    with raises(SessionError, "have an owner"):
        adopt(timeout=60)
    everyone()
    first.close()
    assert not registry() & ours
    assert set(groups_held(parallel_state)) == second
    assert total(parallel_state.get_pipeline_model_parallel_group()) == 4
    adopt(timeout=60).close()
    assert state() == FRESH
    assert registry() == world | leaked

    # WORLD may be destroyed first, and all groups with it.
    initialise(2, 2)
    last = adopt(timeout=60)
    kept = last.groups
    everyone()
    dist.destroy_process_group()
    with raises(SessionError, "WORLD was destroyed"):
        last.suspend()
    last.close()
    assert state() == FRESH
    assert registry() == set()
    with raises(StaleGroupError):
        kept.require("tp")
    return rank


def test_what_is_whose():
    assert on_four(ownership) == [0, 1, 2, 3]


# -- parameters ------------------------------------------------------------------------------------


def third_party(store, rank, size, timeout):
    """A backend that is registered with torch and unknown to megapg."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def parameters():
    warnings.simplefilter("ignore")
    dist.Backend.register_backend("untold", third_party, devices=["cpu"])
    dist.init_process_group("gloo", timeout=timedelta(minutes=9))
    world = registry()
    with record_initialize() as record:
        initialise(2, pipeline_model_parallel_size=2, distributed_timeout_minutes=7)
    assert record.arguments is None  # bound before the block
    made = [call for call in record.calls if dist.get_rank() in call.arguments["ranks"]]
    assert len(record.calls) > len(made) == len(registry() - world)
    assert made[0].arguments["timeout"] == timedelta(minutes=7)
    adopt(record).close()
    with record_initialize() as record:
        parallel_state.initialize_model_parallel(2, pipeline_model_parallel_size=2)
    assert record.arguments["tensor_model_parallel_size"] == 2
    assert record.arguments["distributed_timeout_minutes"] == 30  # the default
    assert parallel_state.initialize_model_parallel is initialise
    for group in groups_held(parallel_state):
        call = record.call_for(group)
        assert sorted(call.arguments["ranks"]) == dist.get_process_group_ranks(group)
        assert call.arguments["group_desc"] == group.group_desc
    everyone()

    # The groups are made again with later changes and with the same order of ranks.
    tp, dp = parallel_state._TENSOR_MODEL_PARALLEL_GROUP, parallel_state._DATA_PARALLEL_GROUP
    c10d._set_pg_timeout(timedelta(seconds=77), tp)
    before = groups_by_variable()
    plain = {
        n: v for n, v in state().items() if n not in before and n != "_global_process_group_list"
    }
    listed = [group and group.group_desc for group in parallel_state._global_process_group_list]
    owner = adopt(timeout=60)
    described = owner.describe()["communicators"]
    assert described["tp"]["timeout"] == 77
    assert described["dp"] | {"timeout": 0} == {
        "ranks": dist.get_process_group_ranks(dp),
        "backend": "gloo",
        "timeout": 0,
        "description": "DATA_PARALLEL_GROUP",
        "options": {},
        "unknown": [],
    }
    assert described["gloo.expt_dp+gloo.intra_expt_dp"]["timeout"] == 30 * 60  # gloo's default
    gone = owner.suspend()
    with raises(SessionError, "needs live groups", "resume() first"):
        _ = owner.groups
    with raises(SessionError, "needs live groups"):
        owner.suspend()
    assert f"{len(described)} communicators suspended by recreate" in str(gone)
    assert {n: state()[n] for n in plain} == plain  # sizes, rank lists, memory buffer
    assert not parallel_state.is_initialized()
    # A group that other code stored while the owner was suspended is kept.
    other = dist.new_group(range(4))
    if dist.get_rank() == 2:
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = other
    with raises(UnsupportedOffloadError, "rank 2: _PIPELINE_MODEL", "holds another group"):
        owner.resume()
    assert owner.state is LeaseState.SUSPENDED
    assert groups_held(parallel_state) == ([other] if dist.get_rank() == 2 else [])
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = None
    dist.destroy_process_group(other)
    back = owner.resume()
    assert (back.how, back.groups_gone, back.unknown) == ("recreate", -gone.groups_gone, {})
    assert groups_by_variable() == before
    assert {n: state()[n] for n in plain} == plain
    assert [g and g.group_desc for g in parallel_state._global_process_group_list] == listed
    assert owner.describe()["communicators"] == described
    assert set(groups_held(parallel_state)) == {group for _, group in owner._made}
    assert owner.generation == owner.groups.lease.generation == 3
    assert total(parallel_state.get_tensor_model_parallel_group()) == 2
    assert tp.group_name != parallel_state._TENSOR_MODEL_PARALLEL_GROUP.group_name
    assert not registry() & {tp, dp}
    owner.close()
    assert registry() == world

    # Unknown options are listed, and suspend() refuses to guess them.
    initialise(2, 2, create_gloo_process_groups=False)
    untold = parallel_state.create_group(
        [0, 1, 2, 3], backend="cpu:untold", group_desc="A_THIRD_PARTYS_GROUP"
    )
    owner = adopt(timeout=60)
    assert owner.unknown == {"A_THIRD_PARTYS_GROUP": ("pg_options",)}
    with raises(UnsupportedOffloadError, "untold", "ranks 0, 1, 2, 3"):
        owner.suspend()
    with raises(UnsupportedOffloadError, "WORLD is not theirs"):
        owner.suspend("recreate world")
    with raises(UnsupportedOffloadError, "different ways"):
        owner.suspend("recreate" if dist.get_rank() == 1 else "suspend")
    assert owner.state is LeaseState.LIVE
    assert total(owner.groups.tp) == 2
    assert total(untold) == 4
    owner.close()
    assert registry() == world
    assert state() == FRESH
    return True


def test_groups_are_made_anew_with_all_that_is_known_of_them():
    assert all(on_four(parameters))


def dozing_off():
    warnings.simplefilter("ignore")
    dozing.install()
    dist.init_process_group("cpu:dozing")
    parallel_state.initialize_model_parallel(2, 2, create_gloo_process_groups=False)
    with adopt(timeout=60) as owner:
        groups, before = owner.groups, state()
        assert total(groups.tp) == 2
        gone = owner.suspend()
        assert (gone.how, gone.groups_gone, owner.state) == ("suspend", 0, LeaseState.SUSPENDED)
        held = len(groups_held(parallel_state)) * (dozing.GIVEN_BACK + dozing.KEPT)
        assert gone.bytes == {"dozing": (held, len(owner._made) * dozing.KEPT)}
        assert all(dozing.of(group).asleep for group in groups_held(parallel_state))
        with raises(StaleGroupError, "resume()"):
            groups.require("tp")
        with raises(SessionError, "resume() first"):
            _ = owner.groups
        assert owner.resume().how == "suspend"
        assert owner.groups is groups.require("tp")
        assert state() == before
        assert not any(dozing.of(group).asleep for group in groups_held(parallel_state))
        assert total(groups.tp) == 2
        assert owner.rebind({"a": groups.tp}).replaced == ()
        # A third party's group may have options that only a record shows.
        assert set(owner.unknown.values()) == {("pg_options",)}
        with raises(UnsupportedOffloadError, "nobody can tell pg_options of ", "and more"):
            owner.suspend("recreate")
        report = owner.suspend("recreate", allow_unknown=True)
        assert report.unknown == owner.unknown
        assert "unknown of tp: pg_options" in str(report)
        owner.resume()
        assert total(parallel_state.get_tensor_model_parallel_group()) == 2
        assert owner.unknown == report.unknown
        del groups, before
    assert state() == FRESH
    return len(registry())


def test_groups_that_can_doze_off_stay_where_they_are():
    assert on_four(dozing_off) == [1] * 4


class Config:
    """NCCL's settings as torch shows them; the lowest integer means "not set"."""

    def __init__(self):
        self.blocking = self.cga_cluster_size = self.min_ctas = self.max_ctas = -(2**31)
        self.split_share, self.net_name = -(2**31), None

    def unsafe_get_ptr(self):
        return 0


class Options:
    def __init__(self, **settings):
        self.config = Config()
        self.is_high_priority_stream = settings.pop("is_high_priority_stream", False)
        vars(self.config).update(settings)


def nccl(options, call=None):
    found, unknown = creations_of_core._nccl_options(SimpleNamespace(options=options), call)
    return found.given(), unknown


def test_what_nccl_was_asked_for_is_read_from_torch_and_from_the_record():
    asked = Options(max_ctas=8, net_name="IB", is_high_priority_stream=True)
    told = {"max_ctas": 8, "net_name": "IB", "is_high_priority_stream": True}
    # Only the call tells whether SHARP was used.
    assert nccl(asked) == (told, ["NCCL_COLLNET_ENABLE"])
    assert nccl(Options(), Call({"pg_options": asked}, None)) == (told, [])
    assert nccl(asked, Call({"pg_options": None}, None)) == ({}, [])
    assert nccl(Options(), Call({"pg_options": None}, "1")) == ({}, ["NCCL_COLLNET_ENABLE"])
    shared = Call({"pg_options": Options(split_share=1, min_ctas=2)}, None)
    assert nccl(None, shared) == ({"min_ctas": 2}, ["pg_options.config.split_share"])
    assert nccl(None) == ({}, ["NCCL_COLLNET_ENABLE", "pg_options"])
    assert nccl(object()) == ({}, ["NCCL_COLLNET_ENABLE", "pg_options"])


def test_what_the_globals_still_hold_of_an_ended_cycle_is_not_taken_for_this_one():
    with fake_world(5, 8):
        alone(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
        stale = parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS
        parallel_state.destroy_model_parallel()
        left = registry()
        assert parallel_state._HIERARCHICAL_CONTEXT_PARALLEL_GROUPS is stale
        with pytest.raises(MissingGroupError):
            adopt()
        alone(tensor_model_parallel_size=4)
        made = registry() - left
        owner = adopt()
        assert owner.groups.hcp is None
        assert owner.groups.ranks("tp") == (4, 5, 6, 7)
        told = [leftover.description for leftover in owner.leftovers]
        assert len(told) == len(left) - 1
        assert "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0" in told
        before = [group.group_desc for group in groups_held(parallel_state)]
        assert owner.suspend().groups_gone == len(made)
        owner.resume()
        assert [group.group_desc for group in groups_held(parallel_state)] == before
        assert owner.groups.ranks("tp") == (4, 5, 6, 7)
        del made
        owner.close()
        assert registry() == left
        assert state() == FRESH


def test_groups_are_ended_in_reverse_and_every_one_is_attempted(monkeypatch):
    with fake_world(0, 4):
        alone(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
        owner = adopt()
        made = [group for group in c10d._world.pg_map if group is not dist.group.WORLD]
        ended, destroy = [], dist.destroy_process_group

        def failing(group):
            ended.append(group)
            if group in (made[3], made[7]):
                raise RuntimeError("the driver is gone")
            destroy(group)

        monkeypatch.setattr(dist, "destroy_process_group", failing)
        with raises(TeardownError, "the driver is gone", "of ranks") as caught:
            owner.close()
        del caught
        assert ended == made[::-1]
        assert registry() == {dist.group.WORLD, made[3], made[7]}
        assert state() == FRESH
        monkeypatch.undo()
        assert owner.state is LeaseState.FAILED
        owner.close()  # closes the remaining groups
        assert owner.closed
        assert registry() == {dist.group.WORLD}


# -- ranks that fail or are late -------------------------------------------------------------------


def gone_missing():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), registry()

    # adopt() fails on rank 3, and rank 0 leads. The other ranks fail without a wait.
    initialise(2, 2)
    if rank == 3:
        saved = dict.fromkeys(("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP"))
        saved |= {"_DATA_PARALLEL_GROUP": None}
        saved = {name: vars(parallel_state)[name] for name in saved}
        vars(parallel_state).update(dict.fromkeys(saved))
        with raises(MissingGroupError):
            adopt(timeout=60)
        vars(parallel_state).update(saved)
    else:
        with raises(RendezvousError, "rank 3", "holds no live group", missing=(3,)):
            adopt(timeout=60)
    everyone()

    # The body fails on one rank. The other ranks get the error, and no rank hangs.
    def body(owner):
        with owner:
            if rank == 1:
                raise KeyError("the body's own")

    owner = adopt(timeout=20)
    with raises(KeyError if rank == 1 else RendezvousError, "the body's own"):
        body(owner)
    assert owner.closed
    assert registry() == world
    assert state() == FRESH
    everyone()

    # Rank 2 is late at close(): all ranks fail within the timeout.
    initialise(2, 2)
    owner = adopt(timeout=2)
    with coming_late(2, "close"), raises(RendezvousError, "aborted", "rank 2", missing=(2,)):
        owner.close()
    assert registry() == world
    assert state() == FRESH
    everyone()

    # A failed suspend() loses the groups on all ranks within the timeout; a new cycle works.
    initialise(2, 2)
    owner = adopt(timeout=2)
    says = ("rank 1 came too late",) if rank == 1 else ("rank 1 on ", "did not come within 2 s")
    with coming_late(1, "suspend"), raises(OffloadError, *says):
        owner.suspend()
    assert owner.state is LeaseState.FAILED
    assert registry() == world
    assert groups_held(parallel_state) == []
    with raises(SessionError, "failed", "close()"):
        owner.resume()
    owner.close()
    assert state() == FRESH
    everyone()

    # A group cannot be made on one rank in resume().
    initialise(2, 2)
    owner = adopt(timeout=20)
    owner.suspend()
    if rank == 3:
        communicator = next(iter(owner._creations))
        owner._creations[communicator] = replace(owner._creations[communicator], description=None)
    with raises(OffloadError, "rank 3"):
        owner.resume()
    assert owner.state is LeaseState.FAILED
    assert registry() == world
    owner.close()
    assert state() == FRESH
    everyone()

    initialise(2, 2)
    owner = adopt(timeout=60)
    owner.suspend()
    owner.resume()
    assert total(parallel_state.get_pipeline_model_parallel_group()) == 2
    owner.suspend()
    owner.close()  # works in this state, too
    assert state() == FRESH
    assert registry() == world
    return rank


def test_a_rank_that_fails_or_does_not_come_is_named_and_nothing_hangs():
    assert on_four(gone_missing) == [0, 1, 2, 3]


def interrupted():
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    initialise(2)
    owner = adopt(timeout=60)
    if dist.get_rank() == 1:  # the first rank waits for this rank and gets the reason
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        owner._coordinator.part = partial(slowly, owner._coordinator.part)
        with pytest.raises(KeyboardInterrupt):
            owner.close()
    else:
        with raises(RendezvousError, "rank 1: KeyboardInterrupt", missing=(1,)):
            owner.close()
    assert owner.closed
    assert state() == FRESH
    assert registry() == {dist.group.WORLD}
    return True


def slowly(part, problem, *, timeout):
    """Delay the report of success, as on a rank that is interrupted while it reports."""
    if problem is None:
        time.sleep(30)
    return part(problem, timeout=timeout)


def test_an_interrupted_close_tells_the_others_and_leaves_nothing():
    assert on_four(interrupted, world_size=2) == [True] * 2
