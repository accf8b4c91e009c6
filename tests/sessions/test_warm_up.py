"""``warm_up``: opened communicators, their order, the report, and the end if a rank fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import freezing
import pytest
import torch
import torch.distributed as dist
from at_once import at_once
from steps import Steps
from stepwise import TEXT, distributed

import megapg
from megapg.collection import LeaseState
from megapg.communicators import warm_up as warming
from megapg.communicators import watch
from megapg.communicators.backends import backend_for
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import Communicator, Recipe, communicators
from megapg.communicators.warm_up import Opened, WarmUpReport
from megapg.errors import MegapgError, RankFailedError, RendezvousError, SessionError
from megapg.launch import Launch
from megapg.megatron import adopt, parallel_state
from megapg.ownership.opening import fake_session
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.store import Store, StoreError, host_of
from megapg.testing import megatron_on_cpu, run_distributed
from megapg.tools.demo.job import GPTRun

SHORT = GPTRun(steps=2, layers=4, hidden=32, seq_length=32, num_microbatches=2)
SOON = 10.0
# Extra time after a deadline on a busy machine, in seconds.
LOADED = 15.0
GONE = ("frozen", "raising")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Start the jobs in which a rank fails."""
    with freezing.hosting() as host:
        jobs = {
            case: (partial(broken, case, str(tmp_path_factory.mktemp(case))), 4) for case in GONE
        }
        jobs["interrupted"] = partial(interrupted_while_frozen, *host), 2
        with at_once(jobs) as started:
            yield started


# -- the order -------------------------------------------------------------------------------------

LAYOUTS = [
    {"world_size": 8, "tp": 2, "pp": 2},
    {"world_size": 8, "tp": 2, "pp": 4, "vpp": 2},
    {"world_size": 16, "tp": 2, "pp": 2, "cp": 2, "ep": 2, "expt_tp": 1},
    {"world_size": 16, "tp": 2, "cp": 4, "hierarchical_cp": (2, 2)},
    {"world_size": 16, "pp": 8, "optimizer_instances": 2},
    {"world_size": 12, "pp": 3, "tp": 2, "order": "tp-pp-dp-cp-ep"},
    {"world_size": 8, "cp": 4, "hybrid_cp": True},
    {"world_size": 6, "pp": 2, "ranks": (1, 3, 4, 7, 8, 9)},
]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_no_rank_waits_in_a_circle(sizes, backend):
    layout = megapg.ParallelLayout(**sizes)
    recipe = Recipe(
        backend, backend_for(backend).lanes, {}, frozenset(), True, gloo=frozenset({"dp_cp"})
    )
    left = {
        rank: [
            step.communicator
            for step in warming._steps(
                [(each, None) for each in communicators(layout, recipe, rank)], rank, unbatched=True
            )
        ]
        for rank in layout.ranks
    }
    assert all(len(each.ranks) > 1 for steps in left.values() for each in steps)
    for rank, steps in left.items():
        wanted = [c for c in communicators(layout, recipe, rank) if len(c.ranks) > 1]
        assert set(steps) == set(wanted)
    while any(left.values()):
        ready = [
            first
            for rank, (first, *_) in ((r, s) for r, s in left.items() if s)
            if rank == first.ranks[0] and all(left[r][:1] == [first] for r in first.ranks)
        ]
        assert ready, left
        for each in ready:
            for rank in each.ranks:
                left[rank].pop(0)


def test_pairs_are_in_one_order_on_all_ranks(monkeypatch):
    monkeypatch.setattr(warming.dist, "group", SimpleNamespace(WORLD=None))
    layout = megapg.ParallelLayout(world_size=5, pp=5, vpp=2)
    recipe = Recipe("nccl", backend_for("nccl").lanes, {}, frozenset(), False)
    for rank in range(5):
        made = [(each, None) for each in communicators(layout, recipe, rank)]
        for unbatched in (True, False):
            (step,) = [
                step
                for step in warming._steps(made, rank, unbatched=unbatched)
                if "pp" in step.communicator.fields
            ]
            ring = sorted(tuple(sorted((rank, (rank + by) % 5))) for by in (1, 4))
            assert list(step.pairs) == (ring if unbatched else [])


def place(field, *members):
    communicator = Communicator((field,), members, CommunicatorOptions(), "gloo")
    return warming._Step(communicator, None).place


EVERYWHERE, DP, PP = place("mp", 0, 1, 2, 3), place("dp", 1, 3), place("pp", 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        # Rank 1 or 3 is late for its dp group, so that all others wait at a later place.
        (
            {0: EVERYWHERE, 2: watch.THE_END, 3: DP},
            "dp of ranks 1, 3 {not}; rank 1 was at the start",
        ),
        (
            {0: EVERYWHERE, 2: watch.THE_END, 1: DP},
            "dp of ranks 1, 3 {not}; rank 3 was at the start",
        ),
        # The links of a pipeline open one by one: rank 1 has opened its link.
        (
            {0: PP, 1: watch.THE_END, 2: PP},
            "pp of ranks 0, 1, 2, 3 {not}; rank 1 was at the end; rank 3 was at the start",
        ),
        # Rank 1 died before it reported progress: its dp group is open, because rank 3 is done.
        (
            {0: EVERYWHERE, 2: EVERYWHERE, 1: DP, 3: EVERYWHERE},
            "mp of ranks 0, 1, 2, 3 {not}; rank 1 was at dp of ranks 1, 3",
        ),
        (
            {0: watch.THE_END, 2: watch.THE_END, 1: DP, 3: watch.THE_END},
            "dp of ranks 1, 3 {not}; rank 3 was at the end",
        ),
    ],
)
def test_of_all_that_wait_the_earliest_is_named(at, said):
    store = dist.HashStore()
    store = Store(store, host_of(store, "the test's store"))
    ranks = [Coordinator(store, "all", rank, range(4)) for rank in range(4)]
    for rank, where in at.items():
        ranks[rank].post("at", str(where))
    error = TimeoutError("no rank got on for 5 s")
    heard = {
        watch.told_of(error, at.get(rank, watch.THE_START), "check()", ranks[rank])
        for rank in range(4)
    }
    assert heard == {said.replace("{not}", "did not answer: no rank got on for 5 s")}


def test_where_the_store_is_what_failed_nobody_is_said_to_be_elsewhere():
    store = dist.HashStore()
    store = Store(store, host_of(store, "the test's store"))
    silent = Coordinator(store, "all", 0, range(2))
    silent.posts = mock.Mock(side_effect=StoreError("posts", "the store is gone", gone=True))
    communicator = Communicator(("tp",), (0, 1), CommunicatorOptions(), "gloo")
    at = warming._Step(communicator, None).place
    said = watch.told_of(RuntimeError("closed"), at, "check()", silent)
    assert said == "tp of ranks 0, 1 did not answer: RuntimeError: closed"


# -- the report ------------------------------------------------------------------------------------


def test_the_report_is_a_table():
    report = WarmUpReport(
        "session 'default'",
        (
            Opened(("tp", "tp_cp", "expt_tp", "tp_ep"), (0, 1), "nccl", 1.25, 30 * 2**20),
            Opened(("dp",), tuple(range(0, 32, 2)), "nccl", 0.5, 2**20),
        ),
        2.0,
    )
    assert report.bytes == 31 * 2**20
    first, *rows = str(report).splitlines()
    assert first == "session 'default': 2 communicators opened in 2.000 s, 31.0 MiB"
    assert [" ".join(row.split()) for row in rows] == [
        "tp+tp_cp+expt_tp+... ranks 0, 1 nccl 1.250 s 30.0 MiB",
        "dp ranks 0, 2, 4, 6, 8, 10, 12, 14 and 8 more nccl 0.500 s 1.0 MiB",
    ]
    assert len({row.index("nccl") for row in rows}) == 1
    nothing = WarmUpReport("session 'default'", (), 0.0)
    assert str(nothing) == "session 'default': 0 communicators opened in 0.000 s"
    assert nothing.bytes is None


def test_alone_there_is_nothing_to_open():
    with megapg.session(backend="gloo", launch=Launch.alone(), warm_up=True) as session:
        report = session.warm_up()
        assert (report.communicators, report.bytes) == ((), None)
    with pytest.raises(SessionError, match=r"warm_up\(\): session 'default' .* was closed"):
        session.warm_up()
    with fake_session(megapg.ParallelLayout(world_size=8, tp=2, pp=2), 3) as session:
        assert session.warm_up().communicators == ()


# -- a real training step --------------------------------------------------------------------------


def sockets():
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found.add(link)
    return found


def sizes_of(run):
    return {"tp": run.tp, "pp": run.pp, "vpp": run.vpp, "ep": run.ep, "expt_tp": run.expt_tp}


def note(seen, *_):
    seen.append(sockets())


def trained(runs):
    """Return the sockets opened by each run's training after a warm-up, and first without one."""
    from megapg.tools.demo.gpt import train

    warnings.simplefilter("ignore")  # Megatron-core warns about features that a CPU lacks
    came = []
    for run, warm in ((runs[0], False), *((run, True) for run in runs)):
        given = {name: value for name, value in sizes_of(run).items() if value}
        with megatron_on_cpu(), megapg.session(timeout=60, warm_up=warm, **given) as session:
            before, seen = sockets(), []
            with megapg.published(session.groups):
                train(run, TEXT, session.groups, partial(note, seen))
            came.append(max(len(now - before) for now in seen))
            report = session.warm_up()
            assert all(len(each.ranks) > 1 for each in report.communicators)
            assert all(session.rank in each.ranks for each in report.communicators)
            assert all(each.bytes is None and each.seconds for each in report.communicators)
            opened = {"+".join(each.fields): each.ranks for each in report.communicators}
            opened.pop("WORLD", None)
            known = session.describe()["communicators"]
            assert opened == {n: tuple(r) for n, r in known.items() if len(r) > 1}
    return came


RUNS = [
    replace(SHORT, tp=2, pp=2),
    replace(SHORT, pp=2, vpp=2),  # also sends over WORLD
    replace(SHORT, tp=2, ep=2, experts=4, sequence_parallel=True, dispatcher="alltoall"),
]


def test_a_training_step_opens_nothing_more():
    everyone = distributed(partial(trained, RUNS), 4)
    for came in everyone:
        assert came[1:] == [0] * len(RUNS)
    assert all(came[0] for came in everyone)  # otherwise the test measures nothing


def adopted():
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.PrefixStore("adopted", store)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(2, 2)
        with adopt(timeout=60) as owner:
            report = owner.warm_up()
            assert owner.check(communicators=True).ranks == (0, 1, 2, 3)
            before = sockets()
            for field in ("tp", "pp", "dp", "mp"):
                group = getattr(owner.groups, field)
                dist.all_to_all_single(
                    torch.empty(group.size()), torch.ones(group.size()), group=group
                )
            came = len(sockets() - before)
    dist.destroy_process_group()
    return came, [(each.fields, each.ranks) for each in report.communicators]


@pytest.mark.smoke
def test_adopted_groups_are_opened_too():
    for rank, (came, opened) in enumerate(run_distributed(adopted, 4, deadline=200)):
        assert came == 0
        assert (("tp",), (rank // 2 * 2, rank // 2 * 2 + 1)) in [
            (fields[:1], ranks) for fields, ranks in opened if "tp" in fields
        ]
        assert any("pp" in fields for fields, _ in opened)


# -- failed ranks ----------------------------------------------------------------------------------


def at(field, do):
    """Make this rank call ``do`` before it opens the communicator of a field."""
    begun = warming._begun

    def instead(backend, device, step, rank, timeout):
        if field in step.communicator.fields:
            do()
        return begun(backend, device, step, rank, timeout)

    warming._begun = instead


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def fail():
    raise RuntimeError("the adapter is on fire")


def broken(case, folder):
    """Rank 2 of a job with two stages and two data parallel ranks fails."""
    me, steps = int(os.environ["RANK"]), Steps()
    (Path(folder) / str(me)).write_text(str(os.getpid()))
    steps.together()
    if me == 2:
        at("pp", freeze if case == "frozen" else fail)
    started = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        megapg.session(pp=2, timeout=SOON, warm_up=True)
    took = time.monotonic() - started
    steps.say("given up")
    assert not dist.is_initialized()
    if me == 0 and case == "frozen":
        os.kill(int((Path(folder) / "2").read_text()), signal.SIGKILL)
    return str(caught.value), caught.value.missing, took


@pytest.mark.parametrize("case", GONE)
def test_a_rank_that_is_gone_is_named_with_the_field(case, jobs):
    if case == "raising":
        results = dict(enumerate(jobs[case].result()))
    else:
        with pytest.raises(RankFailedError) as failed:
            jobs[case].result()
        assert set(failed.value.failures) == {2}
        results = failed.value.results
    reason = "did not open: RuntimeError: the adapter"
    for rank, (text, missing, took) in results.items():
        assert took < 3 * SOON + 2 + LOADED, (rank, text)
        if case == "raising":
            assert "rank 2: " in text
        else:
            assert 2 in missing, text
            reason = f"did not open: no rank got on for {SOON:g} s"
        assert re.search(rf"pp\+.* of ranks 0, 2 {reason}", text), text


def test_the_accelerator_is_that_of_the_thread_that_asked(monkeypatch):
    """CUDA's current device is per thread, and a new thread starts with the first device."""
    here, chosen = threading.local(), []

    def choose(device):
        here.device = torch.device(device).index
        chosen.append(str(device))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(here, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    begun = []
    monkeypatch.setattr(warming, "_begun", lambda name, device, *_: begun.append(device) or ())
    torch.cuda.set_device("cuda:3")
    tp = Communicator(("tp",), (2, 3), CommunicatorOptions(), "nccl")
    work = warming._Work([warming._Step(tp, object())], 3, 5.0)
    events = [work.events.get(timeout=10) for _ in range(3)]
    assert events[2] is None, events
    assert (here.device, chosen) == (3, ["cuda:3", "cuda:3"])
    assert begun == [torch.device("cuda:3")]


class Stuck:
    """A communicator that stays closed until ``end`` is called, and then fails.

    The watch is paused meanwhile, so that no rank calls the store.
    """

    def __init__(self):
        self._begun, self._done = threading.Event(), threading.Event()
        watch._LOOK = 3600.0
        at("dp", self._wait)

    def _wait(self):
        self._begun.set()
        self._done.wait()
        fail()

    def waited_for(self):
        return self._begun.is_set() and freezing.inside(watch.Watch.next)

    def end(self):
        self._done.set()


def interrupted_while_frozen(host_pid, port):
    """Ctrl-C arrives between two looks of the watch, while the store no longer answers."""
    rank = freezing.Rank.begin(host_pid, port)
    session = megapg.session(timeout=60)
    step = Stuck()
    with rank.frozen(step.waited_for):
        with freezing.interrupted(lambda: step.waited_for() and freezing.stopped(host_pid)):
            session.warm_up()
        assert session.state is LeaseState.FAILED
        step.end()
    with contextlib.suppress(MegapgError):
        session.close()
    return True


def test_ctrl_c_is_heard_while_the_store_does_not_answer(jobs):
    assert jobs["interrupted"].result() == [True] * 2
