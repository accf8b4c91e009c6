"""Sessions that are never closed, closed in the wrong order, or lose their WORLD."""

import contextlib
import gc
import logging
import os
import signal
import sys
import time
import warnings
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from asking import me, registered, works
from processes import captured, run_script
from steps import Steps

import megapg
from megapg.collection import LeaseState
from megapg.errors import RendezvousError, StaleGroupError, TeardownError
from megapg.testing import run_distributed

pytestmark = pytest.mark.torch

SOON = 4.0


def usage(limit):
    """Return the threads and descriptors, once within the limit; closing takes a moment."""
    process = psutil.Process()
    until = time.monotonic() + 10
    while True:
        now = process.num_threads(), process.num_fds()
        if (now[0] <= limit[0] and now[1] <= limit[1]) or time.monotonic() > until:
            return now
        time.sleep(0.05)


@contextlib.contextmanager
def nothing_stays():
    """Check that the block leaves no session, and no more groups, descriptors or threads."""
    gc.collect()
    limit = psutil.Process().num_threads(), psutil.Process().num_fds()
    yield
    assert megapg.open_sessions() == ()
    assert registered() == dist.is_initialized()
    gc.collect()
    left = usage(limit)
    assert left[0] <= limit[0], (left, limit)
    assert left[1] <= limit[1], (left, limit)


def opened(**more):
    session = megapg.session(**{"tp": 2, "timeout": 30, **more})
    assert works(session.groups.tp if session.layout.tp == 2 else session.groups.mp)
    return session


def dropping(name, generation=r"\d+"):
    said = rf"session '{name}' \(generation {generation}\) was dropped without close\(\)"
    return pytest.warns(ResourceWarning, match=said)


def dropped():
    gc.unfreeze()  # settled.py may have frozen objects that hold groups
    steps = Steps()
    for _ in range(2):  # opens the things that stay open by design
        opened().close()

    # When the last reference goes, the session is aborted at once and both names are free.
    with nothing_stays():
        session = opened(name="lost")
        pg = session.groups
        with dropping("lost", session.generation):
            del session
        assert pg.lease.state is LeaseState.CLOSED
        with pytest.raises(StaleGroupError, match=r"as it was dropped without close\(\)"):
            pg.require("tp")
        del pg
        assert not dist.is_initialized()
        again = opened(name="lost")
        assert again.generation > 1
        again.close()

    # A session in a reference cycle ends with garbage collection, at the latest to free its name.
    with nothing_stays():
        gc.disable()
        session = opened(name="round", handle_signals=True)
        handler = signal.getsignal(signal.SIGTERM)
        session.itself = session
        del session
        assert [s.name for s in megapg.open_sessions()] == ["round"]
        with dropping("round"):
            again = opened(name="round")
        gc.enable()
        assert signal.getsignal(signal.SIGTERM) is not handler
        again.close()

    # The same holds for a suspended session and for a failed session.
    with nothing_stays():
        session = opened(name="away")
        session.suspend()
        with dropping("away"):
            del session
        session = opened(name="away")
        session.before_release(lambda: 1 / 0)
        with pytest.raises(megapg.errors.OffloadError):
            session.suspend()
        with dropping("away"):
            del session

    # Only one rank drops its session: the other rank gets an error as soon as it closes.
    steps.together()
    with nothing_stays():
        session = opened(name="one")
        started = time.monotonic()
        if me() == 1:
            with dropping("one"):
                del session
        else:
            with pytest.raises(RendezvousError, match=r"rank 1: .*dropped without close") as told:
                session.close()
            assert told.value.missing == (1,)
            assert session.closed
            del session, told
        assert time.monotonic() - started < 20

    # The owner of WORLD lives as long as any session uses that WORLD.
    steps.together()
    with nothing_stays():
        owner = opened(name="owner")
        other = opened(name="other")
        assert megapg.open_sessions() == (owner, other)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del owner
            gc.collect()
        assert [s.name for s in megapg.open_sessions()] == ["owner", "other"]
        assert works(other.groups.tp)
        with dropping("owner"):
            other.close()
            del other
    with nothing_stays():
        owner, other = opened(name="owner"), opened(name="other")
        with pytest.warns(ResourceWarning) as told:
            del owner, other
        assert [str(w.message).split()[1] for w in told] == ["'other'", "'owner'"]

    # A forked process drops copies of sessions that it does not own.
    with nothing_stays():
        session = opened(name="forked")
        child = os.fork()
        if child == 0:
            mine = megapg.open_sessions()
            del session
            gc.collect()
            os._exit(len(mine))
        assert os.waitpid(child, 0)[1] == 0
        assert works(session.groups.tp)
        session.close()
        del session
    return True


def test_what_is_dropped_without_close_is_closed():
    assert run_distributed(dropped, 2, deadline=200) == [True, True]


def callers_world(name, steps, second=False):
    base = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.PrefixStore(name, base)
    # A second WORLD on one store: gloo must not read the addresses of the first WORLD.
    assert store.delete_key(f"0//cpu//0/{me()}") == second
    steps.together()
    dist.init_process_group(
        "gloo", store=store, rank=me(), world_size=2, timeout=timedelta(seconds=30)
    )


def world_destroyed():
    steps = Steps()
    for _ in range(2):
        opened().close()
    for world_by in ("session", "caller", "same store"):
        with nothing_stays():
            if world_by != "session":
                callers_world(world_by, steps)
            first, second = opened(), opened(name="second")
            away = opened(name="away")
            away.suspend()
            dist.barrier()
            dist.destroy_process_group()
            if world_by == "same store":
                callers_world(world_by, steps, second=True)
            # New sessions work under the same names.
            fresh = opened()
            assert fresh.owns_world == (world_by != "same store")
            assert first.closed
            assert second.closed
            with pytest.raises(megapg.errors.SessionError, match=r"which somebody destroyed"):
                _ = first.groups
            for lost in (second, first, away):
                lost.close()  # no effect, no error
            assert works(fresh.groups.tp)
            again = opened(name="second")
            again.close()
            fresh.close()
            if world_by == "same store":
                dist.barrier()
                dist.destroy_process_group()
            del first, second, away, fresh, again, lost
    return True


def test_a_new_session_opens_after_somebody_destroyed_world():
    assert run_distributed(world_destroyed, 2, deadline=200) == [True, True]


@contextlib.contextmanager
def listening():
    """Collect megapg's log."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megapg").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("megapg").removeHandler(handler)


def failing_body(others):
    others.append(opened(name="other"))
    if me() == 1:
        raise ZeroDivisionError("bad batch")


def owner_first():
    steps = Steps()
    for _ in range(2):
        opened().close()

    # An orderly end: sessions close before the owner of their WORLD, the newest first.
    with nothing_stays(), listening() as lines:
        ended = []
        with opened(name="owner") as owner:
            others = [opened(name=name) for name in ("critic", "reward", "away")]
            for each in others:
                end = each.groups.lease.at_end
                end.append(lambda name=each.name: ended.append(name))
            each.suspend()
            alone = megapg.session(name="alone", ranks=[me()], timeout=30)
            assert [s.name for s in megapg.open_sessions()] == [
                "owner",
                "critic",
                "reward",
                "away",
                "alone",
            ]
        assert ended == ["away", "reward", "critic"]
        assert alone.closed
        assert not dist.is_initialized()
        told = [line for line in lines if "closed first" in line]
        assert len(told) == 4
        assert "'owner' made WORLD" in told[0]
        assert "'alone' is open on it" in told[0]
        del owner, others, each, alone

    # The body's own error is raised, even if closing the other sessions fails.
    with nothing_stays():
        expected = ZeroDivisionError if me() == 1 else RendezvousError
        others = []
        with pytest.raises(expected) as failed, opened(name="owner"):
            failing_body(others)
        assert others[0].closed
        if me() == 0:
            assert "'other'" in str(failed.value)
            assert "rank 1: ZeroDivisionError: bad batch" in str(failed.value)
            assert failed.value.missing == (1,)
        del others, failed

    # A session that fails to close does not keep the others open.
    with nothing_stays():
        owner = opened(name="owner")
        others = [opened(name="stubborn"), opened(name="last")]
        others[0].groups.lease.at_end.append(lambda: 1 / 0)
        with pytest.raises(TeardownError, match="'stubborn'") as failed:
            owner.close()
        assert owner.closed
        assert others[1].closed
        assert not dist.is_initialized()
        others[0].close()
        del owner, others, failed

    # A missing rank costs one wait in total, not one per session.
    with nothing_stays():
        owner, *others = [opened(name=name) for name in ("owner", *"0123")]
        for session in (owner, *others):
            session._timeout = SOON
        if me() == 1:
            steps.hear("closed", [0])
        started = time.monotonic()
        with pytest.raises(RendezvousError, match=r"'3': .*rank 1: did not answer"):
            owner.close()
        took = time.monotonic() - started
        steps.say("closed")
        assert all(other.closed for other in others)
        assert took < 4 * SOON
        del owner, others, session
    return True


def test_the_owner_of_world_closes_what_is_open_on_it_first():
    assert run_distributed(owner_first, 2, deadline=200) == [True, True]


STILL_OPEN = """
import megapg
first = megapg.session(name="first")
first.groups.lease.at_end.append(lambda: print("first is over"))
second = megapg.session(name="second")
second.groups.lease.at_end.append(lambda: print("second is over"))
print("the script is over", flush=True)
"""


@pytest.mark.parametrize("warned", ["always", "error"])
def test_what_is_open_when_python_ends_is_closed_too(warned):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = captured(
        [sys.executable, "-W", f"{warned}::ResourceWarning", "-c", STILL_OPEN],
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    # In torch 2.8 and 2.9 gloo prints extra lines.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
    assert lines == ["the script is over", "second is over", "first is over"]
    for name in ("first", "second"):
        said = f"session '{name}' (generation 1) was still open when Python ended"
        assert f"{'ResourceWarning: ' if warned == 'always' else ''}{said}" in done.stderr
    if warned == "always":
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


AT_EXIT = """
import atexit, sys, threading
from megapg.rendezvous import call_in_thread
import megapg

call_in_thread._NONE_AT_EXIT = True
session = megapg.session(timeout=60, backend="gloo")
if session.rank == 0:
    try:
        session.close()
    except megapg.errors.RendezvousError as error:
        print(error, error.missing)

def none(*_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

@atexit.register  # the last one is called first
def as_python_312():
    threading.Thread.start = none
"""


def test_where_no_thread_starts_at_exit_the_others_are_told_all_the_same(tmp_path):
    """Rank 1 does not host the store, so it would call the store from another thread."""
    started = time.monotonic()
    heard, _ = run_script(AT_EXIT, tmp_path, 2)[0]
    assert "rank 1: SessionError: session 'default'" in heard
    assert "was still open when Python ended" in heard
    assert heard.rstrip().endswith("(1,)")
    assert time.monotonic() - started < 55
