"""A process group between the processes of two jobs, and a job that loses members."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fault_driver import Forge
from ports import free_port
from torch.distributed import distributed_c10d as c10d

import megapg
from megapg.communicators import create
from megapg.errors import (
    LayoutError,
    LayoutMismatchError,
    MegapgError,
    RendezvousError,
    SessionError,
    UnsupportedOptionError,
)

SIZES = {"trainer": 2, "rollout": 2}
# Timeouts of megapg and of collectives, in seconds.
SOON = 3.0
COLLECTIVE = timedelta(seconds=2)


@pytest.fixture(scope="module")
def forge():
    with Forge(__name__) as forge:
        yield forge


@pytest.fixture
def address():
    with megapg.SharedStore("127.0.0.1") as store:
        yield store.address


def place(sizes=SIZES):
    """Return the side of this process, and its rank there."""
    rank = int(os.environ["RANK"])
    return ("trainer", rank) if rank < sizes["trainer"] else ("rollout", rank - sizes["trainer"])


def joint(address, name="weights", *, sizes=SIZES, at=None, **options):
    side, rank = at or place(sizes)
    options = {"timeout": 20.0, "collective_timeout": timedelta(seconds=20), **options}
    return megapg.joint_group(name, side=side, rank=rank, sizes=sizes, store=address, **options)


def total(group):
    value = torch.tensor(float(group.rank() + 1))
    dist.all_reduce(value, group=group)
    return value.item()


def known():
    """Return the entries of torch's tables of groups."""
    world = c10d._world
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag, world.tags_to_pg)
    return sum(map(len, tables))


def told(error):
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


# ---- use -----------------------------------------------------------------------------------------


def without_world(address):
    with joint(address) as weights, joint(address, "logs") as logs:
        assert (weights.size, weights.generation, weights.sizes) == (4, 1, SIZES)
        assert weights.ranks("rollout") == range(2, 4)
        assert weights.member(weights.rank) == place()
        value = torch.tensor(float(weights.rank))
        dist.broadcast(value, group_src=1, group=weights.group)
        if weights.rank == 0:
            dist.send(torch.tensor(5.0), group_dst=3, group=weights.group)
        if weights.rank == 3:
            dist.recv(value, group_src=0, group=weights.group)
        assert len(weights.check().ranks) == 4
        assert total(weights.group) == total(logs.group) == 10
        found = value.item(), weights.describe()["generation"]
    assert known() == 0
    with pytest.raises(SessionError, match="was closed at"):
        _ = weights.group
    with joint(address) as again:
        assert again.generation == 2
        assert total(again.group) == 10
    return found


@pytest.mark.torch
@pytest.mark.smoke
def test_ranks_of_two_jobs_have_a_group_without_world(forge, address):
    assert forge.results(partial(without_world, address), 4) == [(1.0, 1)] * 3 + [(5.0, 1)]


def beside_sessions(address, ports):
    """Open a session in each side. Each side is a job with a separate WORLD."""
    side, rank = place()
    launch = megapg.Launch(rank=rank, world_size=2, address="127.0.0.1", port=ports[side])
    with (
        megapg.session(tp=2, launch=launch, timeout=20.0) as session,
        megapg.joint_group(
            "weights", side=side, sizes=SIZES, store=address, timeout=20.0
        ) as weights,
    ):
        assert weights.member(weights.rank) == (side, dist.get_rank())
        found = total(weights.group), total(session.groups.tp), total(dist.group.WORLD)
        # WORLD ends, and torch ends all groups with it.
        session.close()
        with pytest.raises(SessionError, match="WORLD was destroyed"):
            _ = weights.group
        weights.renew()
        assert total(weights.group) == 10
    assert known() == 0
    return found


def test_sessions_of_each_job_stay_apart(forge, address):
    ports = {side: free_port() for side in SIZES}
    job = partial(beside_sessions, address, ports)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert forge.results(job, 4, env=env) == [(10.0, 3.0, 3.0)] * 4


def test_the_example_of_the_guide(address, tmp_path):
    page = Path(__file__).parents[2] / "migration_guide" / "rl-framework.md"
    [script] = re.findall(r"`send_weights.py`:\n\n```python\n(.*?)```", page.read_text(), re.S)
    (tmp_path / "send_weights.py").write_text(script)
    ranks = [("trainer", "0"), ("trainer", "1"), ("rollout", "0")]
    processes = [
        subprocess.Popen(
            [sys.executable, "send_weights.py", *rank, address],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in ranks
    ]
    said = [process.communicate(timeout=100)[0].strip() for process in processes]
    assert said == [f"{side} {rank} has [7.0, 7.0, 7.0, 7.0]" for side, rank in ranks]


# ---- ranks that do not come ----------------------------------------------------------------------


def one_is_missing(address):
    if place() == ("rollout", 1):
        return ()
    with pytest.raises(RendezvousError) as caught:
        joint(address, timeout=SOON, hosts={"rollout": ["node7", "node8"]})
    assert "side 'rollout' rank 1 on node8 never arrived" in str(caught.value)
    return caught.value.missing


def test_a_missing_rank_is_named_by_its_side(forge, address):
    assert forge.results(partial(one_is_missing, address), 4) == [(3,)] * 3 + [()]


def sizes_differ(address, other):
    side, rank = place()
    sizes = SIZES if side == "trainer" else other
    since = time.monotonic()
    with pytest.raises(LayoutMismatchError, match="came with different sizes") as caught:
        joint(address, sizes=sizes, at=(side, rank), timeout=6.0)
    assert time.monotonic() - since < 30.0
    return set(caught.value.differences["sizes"].values())


@pytest.mark.parametrize("other", [{"rollout": 2, "trainer": 2}, {"trainer": 2, "rollout": 3}])
def test_other_sizes_are_a_mismatch(forge, address, other):
    texts = {", ".join(f"{side} {size}" for side, size in each.items()) for each in (SIZES, other)}
    assert forge.results(partial(sizes_differ, address, other), 4) == [texts] * 4


def alone(address, **options):
    values = {"side": "a", "rank": 0, "sizes": {"a": 1}, "store": address, **options}
    return megapg.joint_group("alone", **values)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"side": "b"}, LayoutError, "there is no side 'b'; the sides are a"),
        ({"rank": 1}, LayoutError, "rank=1 is not within the 1 ranks of side 'a'"),
        ({"sizes": {}}, LayoutError, "sizes={}: give the number of ranks of each side"),
        ({"sizes": {"a": 0}}, LayoutError, "at least 1"),
        ({"rank": None}, SessionError, "give rank="),
        ({"store": "localhost"}, SessionError, "give an address such as 'tcp://"),
        ({"store": "tcp://127.0.0.1:1", "timeout": 0.5}, RendezvousError, "nobody listens there"),
        ({"store": 5}, SessionError, "store=5"),
        ({"timeout": 0}, SessionError, "timeout=0"),
        ({"backend": "fake"}, UnsupportedOptionError, "fake has no joint groups"),
        ({"foreign": {"a": print}}, SessionError, "the side of this process"),
        ({"foreign": {"b": print}}, LayoutError, "there is no side 'b'"),
        (
            {"foreign": {"b": print}, "sizes": {"b": 1, "a": 1}},
            SessionError,
            "List another side first",
        ),
        (
            {"foreign": {"b": print}, "sizes": {"a": 1, "b": 1}, "store": dist.HashStore()},
            SessionError,
            "needs a TCP store",
        ),
    ],
)
def test_bad_arguments_are_refused(address, options, kind, says):
    with pytest.raises(kind, match=says.replace("{", r"\{").replace("(", r"\(")):
        alone(address, **options)
    assert known() == 0


def test_a_name_is_open_once_in_a_process(address):
    with alone(address), pytest.raises(SessionError, match="is open in this process"):
        alone(address)
    with alone(dist.HashStore()) as other:  # torch's own store
        assert other.generation == 1


def test_a_dropped_group_is_aborted(address):
    with pytest.warns(ResourceWarning, match="dropped without close"):
        alone(address)
    assert known() == 0
    with megapg.SharedStore("127.0.0.1") as store:
        lost = alone(store.address)
    with pytest.raises(RendezvousError, match=r"is gone"):
        lost.close()
    assert known() == 0


def last_rank_hosts(fails):
    """The process that hosts the store does not lead, and stops hosting when it has closed."""
    board = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with contextlib.ExitStack() as stack:
        if place() == ("rollout", 1):
            store = stack.enter_context(megapg.SharedStore("127.0.0.1"))
            board.set("address", store.address)
        else:
            store = board.get("address").decode()
        try:
            with joint(store) as weights:
                assert total(weights.group) == 10
                if fails and place() == ("rollout", 1):
                    raise KeyError("of my own")
                if place() == ("trainer", 0):
                    time.sleep(1.0)  # ranks that have waited long look less often
        except (RendezvousError, KeyError) as error:
            return str(error)
    return ""


@pytest.mark.parametrize("fails", [False, True])
def test_the_store_stays_until_the_other_ranks_have_read(forge, fails):
    *others, host = forge.results(partial(last_rank_hosts, fails), 4)
    assert host == ("'of my own'" if fails else "")
    for said in others:
        assert "side 'rollout' rank 1: KeyError: 'of my own'" in said if fails else not said


# ---- members change ------------------------------------------------------------------------------


def members_change(address):
    """Rollout rank 0 dies, rank 1 takes its place, and a new process becomes rank 1."""
    number = int(os.environ["RANK"])
    smaller = {"trainer": 2, "rollout": 1}
    shared = dist.TCPStore("127.0.0.1", int(address.rpartition(":")[2]))
    if number == 4:  # the new process
        shared.get("come")
        with joint(address, at=("rollout", 1), collective_timeout=COLLECTIVE) as weights:
            return weights.generation, total(weights.group)
    side, rank = place()
    options = {"timeout": 20.0, "collective_timeout": COLLECTIVE}
    with joint(address, at=(side, rank), **options) as weights:
        assert total(weights.group) == 10
        if (side, rank) == ("rollout", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            total(weights.group)
        with pytest.raises(RendezvousError, match=r"side 'rollout' rank 0 on .* did not come"):
            weights.check(SOON)
        weights.renew(smaller, rank=0 if side == "rollout" else None)
        assert (weights.generation, weights.size, total(weights.group)) == (2, 3, 6)
        shared.set("come", "")
        weights.renew(SIZES)
        return weights.generation, total(weights.group)


def test_a_dead_member_is_dropped_and_a_new_one_admitted(forge, address):
    ends = forge.run(partial(members_change, address), 5)
    assert ends[2].signal == signal.SIGKILL
    assert [end.get() for end in ends if not end.signal] == [(3, 10.0)] * 4


def renewed_in_vain(address):
    """A new member does not come: the group of the last generation still works."""
    with joint(address, timeout=5.0) as weights:
        with pytest.raises(RendezvousError, match="side 'rollout' rank 2 never arrived") as caught:
            weights.renew({"trainer": 2, "rollout": 3})
        assert caught.value.missing == (4,)
        if weights.rank != 3:  # which goes on at once
            named = r"side 'rollout' rank 1 on \S+ never arrived"
            with pytest.raises(RendezvousError, match=named):
                weights.renew()
        before = weights.generation, total(weights.group)
        weights.renew()
        return before, weights.generation, total(weights.group)


def test_a_group_outlives_an_agreement_that_failed(forge, address):
    assert forge.results(partial(renewed_in_vain, address), 4) == [((1, 10.0), 2, 10.0)] * 4


def fails_to_end_the_last_group(address):
    """Rank 1 can't end the group of the last generation, when all ranks have met for the next."""
    with joint(address) as weights:
        broken = RuntimeError("the device is lost")
        fails = mock.patch("megapg.ownership.suspension.synchronize", side_effect=broken)
        started = time.monotonic()
        with (
            fails if weights.rank == 1 else contextlib.nullcontext(),
            pytest.raises((RuntimeError, RendezvousError)) as caught,
        ):
            weights.renew()
        assert time.monotonic() - started < 10.0  # half of the timeout
        weights.renew()
        return str(caught.value), total(weights.group)


def test_an_error_in_renew_reaches_all_ranks(forge, address):
    for said, after in forge.results(partial(fails_to_end_the_last_group, address), 4):
        assert "the device is lost" in said
        assert after == 10.0


# ---- fifty kills ---------------------------------------------------------------------------------

PHASES = ("meeting", "creation", "collective", "renew", "close", "any time")
# Longest time in seconds from the start to the end of a survivor. A collective on new connections
# waits five times its timeout (gloo).
BOUND = 3 * SOON + 5 * COLLECTIVE.total_seconds() + 20.0
AT_A_TIME = 5


@dataclass
class Plan:
    """The rank that dies, and when."""

    seed: int

    def __post_init__(self):
        choice = random.Random(self.seed)
        self.victim = choice.randrange(4)
        self.phase = choice.choice(PHASES)
        self.delay = choice.uniform(0.0, 0.5)
        self.checks = choice.random() < 0.5  # ask check() after a failed collective
        self.struck = int(os.environ.get("RANK", -1)) == self.victim

    def reach(self, phase):
        if self.struck and phase == self.phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self):
        if self.struck and self.phase == "any time":
            kill = partial(os.kill, os.getpid(), signal.SIGKILL)
            threading.Timer(self.delay, kill).start()
        elif self.struck and self.phase == "creation":
            create.make_apart = lambda *_, **__: self.reach("creation")


def killed(seed, address):
    """Return the error of a survivor, its seconds, and the number of entries in torch's tables."""
    plan, since = Plan(seed), time.monotonic()
    plan.begin()
    said = ""
    try:
        plan.reach("meeting")
        options = {"timeout": SOON, "collective_timeout": COLLECTIVE}
        with joint(address, f"weights {seed}", **options) as weights:
            try:
                total(weights.group)
                plan.reach("collective")
                total(weights.group)
            except RuntimeError as error:
                if plan.checks and not isinstance(error, MegapgError):
                    weights.check()
                raise
            plan.reach("renew")
            weights.renew()
            total(weights.group)
            while plan.phase == "any time":
                total(weights.group)
            plan.reach("close")
    except Exception as error:
        said = f"{type(error).__name__}: {told(error)}"
    return said, time.monotonic() - since, known()


def problems_of(seed, job):
    """Return the problems of the survivors of one job."""
    plan, wrong = Plan(seed), []
    name = SIDES[plan.victim]
    for rank, end in enumerate(job.ends()):
        if rank == plan.victim:
            if end.signal != signal.SIGKILL:
                wrong.append(f"the victim was not killed: {end}")
            continue
        if end.value is None:
            wrong.append(f"{SIDES[rank]} hangs or failed: {end.error!r} {end.stack}")
            continue
        said, took, left = end.value
        if took > BOUND:
            wrong.append(f"{SIDES[rank]} took {took:.1f} s: {said}")
        if name not in said:
            wrong.append(f"{SIDES[rank]} does not name {name}: {said}")
        if left:
            wrong.append(f"{SIDES[rank]} left {left} entries in torch's tables")
    return [f"seed {seed}, {plan.phase}: {line}" for line in wrong]


SIDES = [f"side {side!r} rank {rank}" for side, size in SIZES.items() for rank in range(size)]


def kill(forge, seeds):
    wrong = []
    for start in range(0, len(seeds), AT_A_TIME):
        with megapg.SharedStore("127.0.0.1") as store:
            jobs = {
                seed: forge.start(partial(killed, seed, store.address), 4, deadline=75.0)
                for seed in seeds[start : start + AT_A_TIME]
            }
            wrong += [line for seed, job in jobs.items() for line in problems_of(seed, job)]
    return wrong


def test_kills_in_five_phases(forge):
    wrong = kill(forge, [1, 2, 3, 4, 5])
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_seeded_kills(forge):
    wrong = kill(forge, range(50))
    assert not wrong, "\n".join(wrong)
