"""Ranks that fail, stall or are killed: the errors, their delay, and recovery.

One job loses a rank in each phase, so that few processes cover much. After each phase the survivors
open a session among themselves, in the same processes.
"""

import contextlib
import gc
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from functools import partial

import freezing
import psutil
import pytest
import torch
import torch.distributed as dist
from asking import registered
from at_once import at_once
from ports import free_port
from processes import run_script
from steps import Steps, until_gone

import megapg
from megapg.collection import LeaseState
from megapg.errors import OffloadError, RankFailedError, RendezvousError

# Timeouts of megapg and of collectives, in seconds.
SOON = 6.0
COLLECTIVE = timedelta(seconds=4)
# Time allowed after a deadline, and extra time on a loaded machine, in seconds.
GRANTED, LOADED = 5.0, 15.0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    with freezing.hosting() as (pid, port):
        jobs = {
            "shrinking": (the_callers_world_shrinks, 4),
            "exiting": partial(exiting, tmp_path_factory.mktemp("exiting")),
            "cold": (cold, 2),
            "hosted": (partial(the_sessions_own_world_shrinks, free_port(), free_port()), 3),
            "killed launcher": (partial(killed_launcher, pid, port), 2),
            **{
                f"{end}, {phase}": partial(
                    run_script, LAST_LINES, tmp_path_factory.mktemp(end), 2, end, phase, awaited=1
                )
                for end, phase in ENDS
            },
        }
        with at_once(jobs) as started:
            yield started


@contextlib.contextmanager
def within(deadline):
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < deadline + GRANTED + LOADED, f"{took:.1f} s for a deadline of {deadline:g} s"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def failing(session, deadline, work):
    """Return the error of a session that runs ``work(group)``, and the notes of the error."""
    with within(deadline), pytest.raises(Exception) as failed, session:
        work(session.groups.tp)
    assert session.closed
    return failed.value, "\n".join(getattr(failed.value, "__notes__", ()))


def reduce(group):
    dist.all_reduce(torch.ones(1), group=group)


def survivors_go_on(count, **more):
    """Check that the first ranks can open and use a session, and that it leaves nothing behind."""
    with megapg.session(tp=count, ranks=range(count), timeout=60, **more) as session:
        total = torch.tensor([session.rank + 1.0])
        dist.all_reduce(total, group=session.groups.tp)
        assert total.item() == count * (count + 1) / 2
        assert dist.get_world_size(session.groups.tp) == count
    assert registered() == dist.is_initialized()


def told(error):
    return "\n".join(
        f"{e!r}\n{''.join(getattr(e, '__notes__', ''))}" for e in error.failures.values()
    )


# -- phases: each uses the first `count` ranks, the last of which fails ---------------------------


def opened(count, timeout=60.0, **more):
    """Open a session with a long timeout, then shorten the timeout."""
    session = megapg.session(tp=count, ranks=range(count), timeout=timeout, **more)
    session._timeout = SOON
    reduce(session.groups.tp)  # connects the ranks
    return session


def an_exception_on_one_rank(count, steps):
    session = opened(count)

    def work(group):
        if session.rank == count - 1:
            raise ZeroDivisionError("mine")
        reduce(group)

    error, notes = failing(session, COLLECTIVE.total_seconds(), work)
    if session.rank == count - 1:
        assert isinstance(error, ZeroDivisionError)
    else:
        assert isinstance(error, RuntimeError)
        assert f"rank {count - 1}: ZeroDivisionError: mine" in notes


def one_rank_is_late_for_a_collective(count, steps):
    """The rank arrives after the timeout of the caller's WORLD and finds the others gone."""
    session = opened(count)

    def work(group):
        if session.rank == count - 1:
            steps.hear("gone", range(count - 1))
        reduce(group)

    error, notes = failing(session, 3.5 * COLLECTIVE.total_seconds(), work)
    steps.say("gone")
    assert isinstance(error, RuntimeError)
    if session.rank == 0:
        assert f"rank {count - 1}: not a word (process " in notes
    elif session.rank == count - 1:
        assert "rank 0: RuntimeError: " in notes


def killed_inside_a_collective(count, steps):
    session = opened(count)
    if session.rank == count - 1:
        freezing.once_inside(dist.all_reduce, die)
    elif session.rank == 0:
        steps.until_gone(count - 1)  # so that the other rank waits inside the collective
    error, notes = failing(session, COLLECTIVE.total_seconds(), reduce)
    assert isinstance(error, RuntimeError)
    assert f"rank {count - 1}: not a word (process " in notes
    assert f"on {socket.gethostname()}): has died" in notes
    assert "in all_reduce on " in notes


def killed_before_a_group_was_first_used(count):
    """Gloo tries to connect for five times the timeout, and nothing ends this wait sooner."""
    session = megapg.session(
        tp=count, ranks=range(count), timeout=SOON, collective_timeout=timedelta(seconds=2)
    )
    if session.rank == count - 1:
        die()
    time.sleep(0.5)
    _, notes = failing(session, 5 * 2.0, reduce)
    assert f"rank {count - 1}: not a word (process " in notes


def killed_while_suspending(count, steps):
    session = opened(count)
    if session.rank == count - 1:
        session.before_release(die)
    with within(SOON + 2.0), pytest.raises(OffloadError) as failed:
        session.suspend()
    assert f"rank {count - 1} on {socket.gethostname()} did not come" in str(failed.value)
    assert session.state is LeaseState.FAILED
    with within(SOON):
        session.close()
    assert session.closed


def killed_while_closing(count, steps):
    session = opened(count)
    if session.rank == count - 1:
        session.groups.lease.before_end.append(lambda error: die())
    with within(SOON + 2.0), pytest.raises(RendezvousError) as failed:
        session.close()
    assert f"not every rank came to close them in order: rank {count - 1}:" in str(failed.value)
    assert failed.value.missing == (count - 1,)
    assert session.closed
    assert registered() == 1


def the_callers_world_shrinks():
    steps = Steps()
    steps.together()  # else slow ranks would time out before they have started
    dist.init_process_group("gloo", timeout=COLLECTIVE)
    everyone = dist.get_world_size()
    world = dist.group.WORLD
    for phase in (
        one_rank_is_late_for_a_collective,
        an_exception_on_one_rank,
    ):
        phase(everyone, steps)
        survivors_go_on(everyone)
    gc.collect()
    threads = psutil.Process().num_threads()
    for count, phase in zip(
        range(everyone, 1, -1),
        (
            killed_inside_a_collective,
            killed_while_suspending,
            killed_while_closing,
        ),
        strict=True,
    ):
        phase(count, steps)
        survivors_go_on(count - 1)
    assert dist.group.WORLD is world
    gc.collect()  # frees what the exceptions hold
    left = psutil.Process().num_threads()
    assert left <= threads, (threads, left, threading.enumerate())
    return "survived"


@pytest.mark.parametrize(
    ("job", "survivor", "killed"),
    [("shrinking", 0, {1, 2, 3}), ("hosted", 1, {0, 2}), ("cold", 0, {1})],
)
def test_the_survivors_of_a_job_go_on(jobs, job, survivor, killed):
    """A job loses one rank after another, the host of its store, or a rank not yet connected."""
    with pytest.raises(RankFailedError) as failed:
        jobs[job].result()
    assert failed.value.results == {survivor: "survived"}, told(failed.value)
    assert set(failed.value.failures) == killed
    for failure in failed.value.failures.values():
        assert str(failure).startswith("killed by SIGKILL"), told(failed.value)


def the_sessions_own_world_shrinks(port, next_port):
    """Rank 0 hosts the store. Survivors set their new ranks as an elastic launcher would."""
    me = int(os.environ["RANK"])
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)

    def lose(rank, world_size):
        session = opened(world_size, collective_timeout=COLLECTIVE)
        if me == rank:
            die()
        error, notes = failing(session, COLLECTIVE.total_seconds(), reduce)
        assert isinstance(error, RuntimeError)
        assert not dist.is_initialized()
        assert registered() == 0
        return notes

    assert "rank 2: not a word" in lose(2, 3)
    os.environ["WORLD_SIZE"] = "2"
    survivors_go_on(2)
    assert "the store that rank 0 hosts at 127.0.0.1:" in lose(0, 2)
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": str(next_port)}
    survivors_go_on(1)
    return "survived"


def cold():
    Steps().together()
    dist.init_process_group("gloo", timeout=COLLECTIVE)
    killed_before_a_group_was_first_used(2)
    survivors_go_on(1)
    return "survived"


EXITING = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import megapg

try:
    with megapg.session(
        timeout=60, backend="gloo", collective_timeout=timedelta(seconds=10), warm_up=True
    ) as session:
        session._timeout = 5.0
        me = session.rank
        open(f"open {me}", "w").close()
        while sum(name.startswith("open") for name in os.listdir()) < 3:
            time.sleep(0.05)
        if me == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if me == 0:
            dist.all_reduce(torch.ones(1), group=session.groups.dp)
        while not os.path.exists("failed"):
            time.sleep(0.05)
except Exception as error:
    print(error, "missing", getattr(error, "missing", None), flush=True)
    open("failed", "w").close()
    sys.exit(1)
"""


LAST_LINES = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
from freezing import has_stopped, stopped
from steps import until_gone
import torch, torch.distributed as dist
import megapg
from megapg.rendezvous.rendezvous import Rendezvous

end, phase = sys.argv[1:]
here = Path("pid")

def strike():
    Path("written").write_text(str(os.getpid()))
    Path("written").rename(here)
    os.kill(os.getpid(), signal.SIGKILL if end == "killed" else signal.SIGSTOP)
    signal.pause()

def lead(self, *_):
    while self._hellos.of(1) is None:
        time.sleep(0.01)
    strike()

def await_the_strike():
    while not here.exists():
        time.sleep(0.01)
    until_gone(int(here.read_text())) if end == "killed" else has_stopped(int(here.read_text()))

me = int(os.environ["RANK"])
Path(f"imported {me}").touch()
while not Path(f"imported {1 - me}").exists():  # so that 3 s are enough to open the session
    time.sleep(0.01)
if phase == "start" and me == 0:
    Rendezvous._lead = lead
session = megapg.session(timeout=3 if phase == "start" else 60, backend="gloo")
session._timeout = 3.0
dist.all_reduce(torch.ones(1), group=session.groups.dp)
if me == 0:
    strike()
await_the_strike()
if phase == "exit":
    session.check()  # the session is still open at exit
with session:
    if phase != "close":
        getattr(session, phase)()
"""
ENDS = [
    *(("killed", "start"), ("killed", "close"), ("killed", "suspend")),
    *(("frozen", "start"), ("frozen", "close"), ("frozen", "exit")),
]


@pytest.mark.parametrize(("end", "phase"), ENDS)
def test_the_error_is_the_last_that_a_rank_prints(jobs, end, phase):
    """If calls to its store fail, torch prints C++ stacks, also of calls that megapg gave up."""
    lines = jobs[f"{end}, {phase}"].result()[1].splitlines()
    last = next(at for at, line in enumerate(lines) if "megapg." in line and "Error: " in line)
    assert "the store that rank 0 hosts" in "".join(lines[last:])
    assert not [line for line in lines[last:] if "frame #" in line or "TCPStore.cpp" in line]
    assert sum("TCPStore.cpp" in line for line in lines) <= (end == "killed")  # one call failed


def exiting(folder):
    return [said for said, _ in run_script(EXITING, folder, 3)]


def test_the_host_of_the_store_stays_until_the_others_know_who_died(jobs):
    """Rank 0 fails because rank 2 was killed. Rank 0 then exits before rank 1 closes."""
    first, second, third = jobs["exiting"].result()
    assert third == ""
    assert "gloo" in first
    assert "rank 0: RuntimeError: " in second
    assert "rank 2: not a word" in second
    assert "missing (2,)" in second


def killed_launcher(pid, port):
    steps = Steps()
    os.environ["MASTER_PORT"] = str(port)
    session = megapg.session(timeout=60)
    steps.together()
    if session.rank == 0:
        os.kill(pid, signal.SIGKILL)
    until_gone(pid)
    with pytest.raises(RendezvousError) as caught:
        session.close()
    return str(caught.value), caught.value.missing


def test_no_rank_is_blamed_for_the_launchers_store(jobs):
    for text, missing in jobs["killed launcher"].result():
        assert re.search(r"in order: the store that torchrun hosts at 127.0.0.1:\d+ is gone", text)
        assert "those ranks" not in text
        assert missing == ()
