"""Ranks that fail, stall or are killed: what the others hear, how soon, and how they go on.

One job after the other loses a rank in each phase, so that few processes show much. After each
phase the survivors open a session among themselves, in the same processes.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

import megapg
from megapg.collection import LeaseState
from megapg.comms import rollcall
from megapg.errors import OffloadError, RankFailedError, RendezvousError
from megapg.testing import distributed, run_distributed

# Of megapg's own waits, and of collectives. Seconds.
SOON = 3.0
COLLECTIVE = timedelta(seconds=3)
# What the issue grants beyond a deadline, and what a loaded machine takes. Seconds.
GRANTED, LOADED = 5.0, 15.0


@pytest.fixture(autouse=True)
def survivors_live_on(monkeypatch):
    monkeypatch.setattr(distributed, "_GRACE_S", 200.0)


@contextlib.contextmanager
def within(deadline):
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < deadline + GRANTED + LOADED, f"{took:.1f} s for a deadline of {deadline:g} s"


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(seconds):
    threading.Timer(seconds, die).start()


def failing(session, deadline, work):
    """What came out of the session in which ``work(group)`` was done, and the notes on it."""
    with within(deadline), pytest.raises(Exception) as failed, session:
        work(session.groups.tp)
    assert session.closed
    return failed.value, "\n".join(getattr(failed.value, "__notes__", ()))


def reduce(group):
    dist.all_reduce(torch.ones(1), group=group)


def survivors_go_on(count, **more):
    """A session of the first ranks works as if nothing had happened, and nothing is left of it."""
    with megapg.session(tp=count, ranks=range(count), timeout=60, **more) as session:
        total = torch.tensor([session.rank + 1.0])
        dist.all_reduce(total, group=session.groups.tp)
        assert total.item() == count * (count + 1) / 2
        assert dist.get_world_size(session.groups.tp) == count
    assert registered() == dist.is_initialized()


def registered():
    return len(dist.distributed_c10d._world.pg_map)


def told(error):
    return "\n".join(
        f"{e!r}\n{''.join(getattr(e, '__notes__', ''))}" for e in error.failures.values()
    )


# -- phases: each with the first `count` ranks, of which the last one is in trouble ---------------


def opened(count, **more):
    session = megapg.session(tp=count, ranks=range(count), **{"timeout": SOON, **more})
    reduce(session.groups.tp)  # connects
    return session


def one_rank_is_late_for_the_start(count):
    """At first by less than the timeout; then by more, and in time for the others' next attempt."""
    last = dist.get_rank() == count - 1
    time.sleep(SOON / 2 if last else 0)
    opened(count, timeout=20).close()
    if last:
        time.sleep(2 * SOON)
        return
    with within(SOON + 2.0), pytest.raises(RendezvousError) as failed:
        opened(count)
    assert failed.value.missing == (count - 1,)
    assert f"rank {count - 1} on {socket.gethostname()} has not come back" in str(failed.value)


def an_exception_on_one_rank(count):
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


def an_exception_in_a_large_job(count):
    """Rank 0 asks all the others there, and they ask rank 0."""
    rollcall._LARGE = 2
    an_exception_on_one_rank(count)
    rollcall._LARGE = 64


def one_rank_is_late_for_a_collective(count):
    """Later than the timeout, which is that of the caller's WORLD; it finds the others gone."""
    session = opened(count)

    def work(group):
        if session.rank == count - 1:
            time.sleep(2.5 * COLLECTIVE.total_seconds())
        reduce(group)

    error, notes = failing(session, 3.5 * COLLECTIVE.total_seconds(), work)
    assert isinstance(error, RuntimeError)
    if session.rank == 0:
        assert f"rank {count - 1}: not a word (process " in notes
    elif session.rank == count - 1:
        assert "rank 0: RuntimeError: " in notes


def killed_inside_a_collective(count):
    session = opened(count)
    if session.rank == count - 1:
        die_in(0.5)
    elif session.rank == 0:
        time.sleep(1.5)  # so that the other is inside, waiting
    error, notes = failing(session, COLLECTIVE.total_seconds(), reduce)
    assert isinstance(error, RuntimeError)
    assert f"rank {count - 1}: not a word (process " in notes
    assert "killed, stuck, or still at work" in notes


def killed_before_a_group_was_first_used(count):
    """Gloo tries to connect for five times the timeout then; nothing ends that wait sooner."""
    session = megapg.session(
        tp=count, ranks=range(count), timeout=SOON, collective_timeout=timedelta(seconds=2)
    )
    if session.rank == count - 1:
        die()
    time.sleep(0.5)
    _, notes = failing(session, 5 * 2.0, reduce)
    assert f"rank {count - 1}: not a word (process " in notes


def killed_while_suspending(count):
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


def killed_while_closing(count):
    session = opened(count)
    if session.rank == count - 1:
        session.groups.lease.before_end.append(lambda error: die())
    with within(SOON + 2.0), heard_in_the_log() as lines:
        session.close()
    assert any(f"{{{count - 1}: 'did not answer'}}" in line for line in lines), lines
    assert session.closed


def killed_while_starting(count):
    """It has said hello, and waits for the first rank, which is late; then it is gone."""
    if dist.get_rank() == count - 1:
        die_in(1.0)
    elif dist.get_rank() == 0:
        time.sleep(2.5)
    with within(SOON + 3.0), pytest.raises(RendezvousError) as failed:
        megapg.session(tp=count, ranks=range(count), timeout=SOON + 1)
    assert f"rank {count - 1}" in str(failed.value)
    assert failed.value.missing == (count - 1,)


@contextlib.contextmanager
def heard_in_the_log():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("megapg")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def the_callers_world_shrinks():
    dist.init_process_group("gloo", timeout=COLLECTIVE)
    everyone = dist.get_world_size()
    world = dist.group.WORLD
    for phase in (
        one_rank_is_late_for_the_start,
        one_rank_is_late_for_a_collective,
        an_exception_on_one_rank,
        an_exception_in_a_large_job,
    ):
        phase(everyone)
        survivors_go_on(everyone)
    gc.collect()
    threads = psutil.Process().num_threads()
    for count, phase in zip(
        range(everyone, 1, -1),
        (
            killed_inside_a_collective,
            killed_while_suspending,
            killed_while_closing,
            killed_while_starting,
        ),
        strict=True,
    ):
        phase(count)
        survivors_go_on(count - 1)
    assert dist.group.WORLD is world
    gc.collect()  # what the exceptions held
    left = psutil.Process().num_threads()
    assert left <= threads, (threads, left, threading.enumerate())
    return "survived"


def test_a_job_that_loses_one_rank_after_the_other():
    with pytest.raises(RankFailedError) as failed:
        run_distributed(the_callers_world_shrinks, 5, deadline=200)
    assert failed.value.results == {0: "survived"}, told(failed.value)
    for rank in range(1, 5):
        assert str(failed.value.failures[rank]).startswith("killed by SIGKILL"), told(failed.value)


def the_sessions_own_world_shrinks(port, next_port):
    """Rank 0 hosts the store. Survivors say who they are now, as an elastic launcher would."""
    me = int(os.environ["RANK"])
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    own = {"collective_timeout": COLLECTIVE, "timeout": 3 * SOON}

    def lose(rank, world_size):
        session = megapg.session(tp=world_size, **own)
        reduce(session.groups.tp)
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
    assert "the store behind WORLD is gone" in lose(0, 2)
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": str(next_port)}
    survivors_go_on(1)
    return "survived"


def test_a_job_whose_host_of_the_store_dies_in_the_end():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    with pytest.raises(RankFailedError) as failed:
        run_distributed(partial(the_sessions_own_world_shrinks, *ports), 3, deadline=150)
    assert failed.value.results == {1: "survived"}, told(failed.value)
    for rank in (0, 2):
        assert str(failed.value.failures[rank]).startswith("killed by SIGKILL"), told(failed.value)


def cold():
    dist.init_process_group("gloo", timeout=COLLECTIVE)
    killed_before_a_group_was_first_used(2)
    survivors_go_on(1)
    return "survived"


def test_a_rank_killed_before_a_group_was_first_used():
    with pytest.raises(RankFailedError) as failed:
        run_distributed(cold, 2, deadline=120)
    assert failed.value.results == {0: "survived"}, told(failed.value)
