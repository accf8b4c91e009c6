"""The process that hosts the store is frozen (SIGSTOP): every wait of the other ranks still ends.

The kernel still accepts connections and messages for the process, so no call to the store fails.
"""

import contextlib
import logging
import os
import re
import socket
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import freezing
import pytest
import torch
import torch.distributed as dist
from at_once import at_once
from ports import free_port
from processes import captured

import megapg
from megapg.communicators.world import current_world
from megapg.errors import MegapgError, RendezvousError
from megapg.launch import detect
from megapg.rendezvous.gathering import GRACE
from megapg.rendezvous.joint_work import JointWork
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.rendezvous.store import Host, Store
from megapg.tools.doctor import gather
from megapg.tools.doctor.account import Account

# megapg's timeouts under test, other timeouts, and extra time on a loaded machine, in seconds.
SOON, PATIENT, LOADED = 3.0, 60.0, 15.0


@pytest.fixture(scope="module")
def jobs():
    with (
        freezing.hosting() as launchers,
        freezing.hosting() as callers,
        freezing.hosting() as exitings,
    ):
        jobs = {
            "exiting": partial(exiting, *exitings),
            "launcher": (partial(all_phases, *launchers), 2),
            "rank 0": (partial(all_phases, None, free_port()), 3),
            "caller": (partial(callers_world, *callers), 2),
        }
        with at_once(jobs) as started:
            yield started


@contextlib.contextmanager
def fails(rank, deadline=SOON + GRACE):
    """Check that the block raises by the deadline, and that the error or the log names the host.

    On the frozen rank itself any end is accepted.
    """
    lines, started, named, of_the_store = [], time.monotonic(), "", False
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megapg").addHandler(handler)
    try:
        yield
    except MegapgError as error:
        named = f"{type(error).__name__}: {error}"
        of_the_store = any(isinstance(each, RendezvousError) for each in unfolded(error))
    finally:
        logging.getLogger("megapg").removeHandler(handler)
    took = time.monotonic() - started
    if rank.freezing:
        return
    assert took < deadline + LOADED, f"{took:.1f} s for a deadline of {deadline:g} s"
    assert named, f"it returned as if all were well; the log has {lines}"
    assert of_the_store, named
    said = "\n".join([named, *lines])
    assert f"at 127.0.0.1:{rank.port}" in said, said
    assert re.search("did not answer within|has not answered an earlier|could not reach", said), (
        said
    )


def unfolded(error):
    """Yield an error, its inner errors and its causes."""
    while error is not None:
        yield error
        for each in getattr(error, "exceptions", ()):
            yield from unfolded(each)
        error = error.__cause__


def opened(**more):
    """Open a session with a long timeout, then shorten the timeout."""
    session = megapg.session(tp=dist_size(), timeout=PATIENT, **more)
    session._timeout = SOON
    return session


def dist_size():
    return int(os.environ["WORLD_SIZE"])


def closed(session):
    started = time.monotonic()
    with contextlib.suppress(MegapgError):
        session.close()
    assert session.closed
    assert not dist.is_initialized()
    return time.monotonic() - started


def before_the_start(rank):
    with rank.frozen():
        if not rank.freezing:
            with fails(rank):
                with pytest.raises(RendezvousError, match="or one whose host is stopped") as caught:
                    megapg.session(tp=rank.size, timeout=SOON)
                raise caught.value


def doctor(rank):
    account = Account(rank.me, socket.gethostname(), "", (), ())
    judging = rank.me == 0
    judged = []
    last = rank.size - 1
    with rank.frozen(partial(freezing.inside, gather._until), late=(last,)):
        # this call has its own grace period
        with contextlib.nullcontext() if judging else fails(rank, SOON + 10.0):
            if rank.me == last:
                rank.wait_until_frozen()
            code = gather.hold(detect(), account, SOON, lambda found: judged.append(found) or 7)
        if judging:  # the judging rank reports its own result
            assert code == 7
            assert f"at 127.0.0.1:{rank.port} did not answer" in judged[0].problem
            assert judged[0].missing == (1,)


def waiting_at_the_start(rank):
    """The last rank arrives after the store is frozen; the others wait for it meanwhile."""
    last = rank.size - 1
    with rank.frozen(partial(freezing.inside, Rendezvous._until), late=(last,)):
        if rank.me == last:
            rank.wait_until_frozen()
        with fails(rank):
            megapg.session(tp=rank.size, timeout=SOON)


def suspending(rank):
    session = opened()
    with rank.frozen(), fails(rank):
        session.suspend()
    assert closed(session) < LOADED


def resuming(rank):
    session = opened()
    session._timeout = PATIENT
    session.suspend()
    session._timeout = SOON
    with rank.frozen(), fails(rank):
        session.resume()
    assert closed(session) < LOADED


def working_together(rank):
    """Work in steps, as the background part of a save does."""
    with contextlib.suppress(MegapgError), opened() as session:
        ranks = range(rank.size)
        team = JointWork(current_world().store, "save", session.rank, ranks, timeout=PATIENT)
        with team.begin({}):
            team._timeout = SOON
            with rank.frozen(), fails(rank):
                team.agree("all is written")


def closing(rank):
    session = opened()
    with rank.frozen(), fails(rank):
        session.close()
    assert closed(session) < LOADED


def interrupting(rank):
    session = opened()
    session._timeout = SOON if rank.freezing else PATIENT
    with rank.frozen():
        if not rank.freezing:
            with freezing.interrupted(partial(freezing.inside, session.suspend.__func__)):
                session.suspend()
    assert closed(session) < SOON + GRACE + LOADED


def all_phases(host_pid, port):
    rank = freezing.Rank.begin(host_pid, port)
    if rank.freezing:  # so that the store is running
        from megapg.rendezvous.job_store import job_store

        job_store(detect(), PATIENT)
    before_the_start(rank)
    phases = [waiting_at_the_start, closing, interrupting]
    if host_pid is not None:  # otherwise these are the same
        phases += doctor, suspending, resuming, working_together
    for phase in phases:
        print(rank.me, phase.__name__, flush=True)
        phase(rank)
    with opened() as session:  # after it resumes, the store works as before
        total = torch.ones(1)
        dist.all_reduce(total, group=session.groups.tp)
        assert total.item() == rank.size
    return True


@pytest.mark.parametrize(("job", "ranks"), [("launcher", 2), ("rank 0", 3), ("caller", 2)])
def test_the_store_is_frozen_in_each_phase(jobs, job, ranks):
    assert jobs[job].result() == [True] * ranks


def callers_world(host_pid, port):
    """The caller made this WORLD. No rank knows the host, so the error gives its address."""
    rank = freezing.Rank.begin(host_pid, port)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank.me, world_size=rank.size)
    session = opened()
    with rank.frozen():
        started = time.monotonic()
        with pytest.raises(MegapgError, match=f"the store behind WORLD, at 127.0.0.1:{port} did"):
            session.suspend()
        assert time.monotonic() - started < SOON + GRACE + LOADED
        session.close()
    return True


EXITING = """
import os, signal, sys, time
import torch.distributed as dist
from freezing import has_stopped
from megapg.rendezvous.store import Store, host_of
from megapg.errors import RendezvousError

pid, port = map(int, sys.argv[1:])
raw = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
store = Store(dist.PrefixStore("here", raw), host_of(raw, "the store"))
store.set("key", "value")
os.kill(pid, signal.SIGSTOP)
has_stopped(pid)
try:
    with store.until(time.monotonic() + 1.0, least=1.0):
        store.check(["key"])
    raise SystemExit("it answered")
except RendezvousError as error:
    print(error)

class Last:
    "What is left when the interpreter finalises: the host answers in just that moment."

    def __del__(self, kill=os.kill, signal=signal.SIGCONT, sleep=time.sleep):
        kill(pid, signal)
        sleep(1.0)

last = Last()
sys.last = last
"""


def exiting(pid, port):
    return captured(
        [sys.executable, "-c", textwrap.dedent(EXITING), str(pid), str(port)],
        cwd=Path(freezing.__file__).parent,
        timeout=120,
    )


def test_a_call_that_is_stuck_does_not_end_the_process_with_an_abort(jobs):
    ended = jobs["exiting"].result()
    assert "did not answer within 1 s" in ended.stdout, ended
    assert ended.returncode == 0, ended


def test_work_that_is_stuck_holds_up_no_call_of_the_same_phase():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = Store(dist.TCPStore("127.0.0.1", server.port, is_master=False), Host("the store"))
    free, undone = threading.Event(), threading.Event()
    with store.until(time.monotonic() + SOON):
        store.set("before", "")  # starts the thread that makes the calls
        with pytest.raises(RendezvousError, match=r"making groups did not end within 0\.2 s"):
            store.lend(free.wait, 0.2, "making groups", undo=lambda _: undone.set())
        store.set("why", "it is stuck")
    assert server.get("why") == b"it is stuck"
    assert not undone.is_set()
    free.set()
    assert undone.wait(LOADED)
