"""suspend() or resume() fails on one rank: every rank gets the reason, and all can start afresh."""

import contextlib
import gc
import os
import time
import weakref
from functools import partial
from unittest import mock

import dozing
import pytest
import torch
import torch.distributed as dist
from asking import me
from steps import Steps

import megapg
from megapg import torch_private
from megapg.collection import LeaseState
from megapg.communicators import create
from megapg.errors import (
    OffloadError,
    SessionError,
    StaleGroupError,
    TeardownError,
)
from megapg.testing import run_distributed

PATIENT = 60.0
HURRIED = 6.0


def failing(on, error):
    """Return a callback that fails on one rank."""

    def callback(*_):
        if me() == on:
            raise error

    return callback


def lost(session, doing):
    """Return the error of ``doing``, and check the state of the failed session."""
    pg = session.groups if session.state is LeaseState.LIVE else None
    generation = session.generation
    started = time.monotonic()
    with pytest.raises(OffloadError) as caught:
        doing()
    seconds = time.monotonic() - started
    assert session.state is LeaseState.FAILED
    assert not any(map(create.session_of, torch_private.known_groups()))
    assert session.generation in (generation, generation + 1)
    for use in (lambda: session.groups, session.suspend, session.resume):
        with pytest.raises(SessionError, match="Close it, and open a new one"):
            use()
    if pg is not None:
        with pytest.raises(StaleGroupError, match=r"were (lost|closed)"):
            pg.require("tp")
    session.close()
    assert session.closed
    assert not dist.is_initialized()
    afresh()
    return str(caught.value), [type(e).__name__ for e in caught.value.exceptions], seconds


def afresh():
    """Check that all ranks can open a new session of the same name in the same processes."""
    with megapg.session(tp=2, pp=2, timeout=PATIENT) as session:
        total = torch.ones(1)
        dist.all_reduce(total, group=session.groups.mp)
        assert total.item() == 4
        session.suspend()
        session.resume()
        dist.all_reduce(total, group=session.groups.mp)
        assert total.item() == 16


def one_after_the_other():
    opened = partial(megapg.session, tp=2, pp=2, timeout=PATIENT)
    told, steps = {}, Steps()

    session, called = opened(), []
    session.before_release(failing(2, ValueError("a graph is in use")))
    session.before_release(lambda: called.append("still"))
    told["callback"] = lost(session, session.suspend)
    assert called == ["still"]

    session = opened()
    session.suspend()
    session.on_resume(failing(0, ValueError("no room for the graph")))
    told["after resume"] = lost(session, session.resume)

    session = opened()
    destroy, gone = dist.destroy_process_group, []

    def stubborn(group=None):
        serves = "" if group is None else group.group_desc.partition(": ")[2]
        if me() == 1 and "tp" in serves.split("+") and not gone:
            gone.append(group)
            raise RuntimeError("ncclCommDestroy failed")
        destroy(group)

    with mock.patch.object(dist, "destroy_process_group", stubborn):
        told["destroy"] = lost(session, session.suspend)
    gone.clear()

    session = opened()
    session.before_release(failing(2, KeyboardInterrupt()))
    if me() == 2:
        with pytest.raises(KeyboardInterrupt):
            session.suspend()
        session.close()
        afresh()
    else:
        told["ctrl-c"] = lost(session, session.suspend)

    # One rank leaves the block because of its own error.
    def leaves(session):
        with session:
            raise ZeroDivisionError("bad batch")

    session = opened()
    if me() == 1:
        with pytest.raises(ZeroDivisionError):
            leaves(session)
        afresh()
    else:
        told["left before"] = lost(session, session.suspend)
    session = opened()
    session.suspend()
    if me() == 1:
        with mock.patch.object(type(session), "__enter__"), pytest.raises(ZeroDivisionError):
            leaves(session)
        afresh()
    else:
        told["left between"] = lost(session, session.resume)

    # One rank is late.
    def late(doing):
        if me() == 3:
            steps.hear(doing.__name__, range(3))
        try:
            doing()
        finally:
            steps.say(doing.__name__)

    session = opened()
    session._timeout = HURRIED
    told["late"] = lost(session, partial(late, session.suspend))

    # After the caller replaces WORLD, the groups belong to another WORLD.
    def make_world(name):
        base = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        dist.init_process_group("gloo", store=dist.PrefixStore(name, base), rank=me(), world_size=4)

    make_world("one")
    session = opened()
    session.suspend()
    dist.barrier()
    dist.destroy_process_group()
    make_world("another")
    with pytest.raises(OffloadError, match="WORLD was replaced by another one"):
        session.resume()
    session.close()
    dist.barrier()
    dist.destroy_process_group()

    # Closing can fail and be repeated.
    session = opened()
    with mock.patch.object(dist, "destroy_process_group", stubborn):
        if me() == 1:
            with pytest.raises(TeardownError, match=r"tp, .* of ranks \(0, 1\)"):
                session.close()
            assert session.state is LeaseState.FAILED
        session.close()
    gone.clear()
    assert session.closed
    assert not dist.is_initialized()
    afresh()
    return told


def test_a_failure_on_one_rank_ends_the_session_on_all_and_nothing_else():
    everyone = run_distributed(one_after_the_other, 4, deadline=280)

    def heard(case, *, by, text, kinds, within=PATIENT / 2):
        for rank in by:
            said, types, seconds = everyone[rank][case]
            assert text in said, (case, rank, said)
            assert types == kinds, (case, rank, types)
            assert seconds < within, (case, rank)

    graph = "ValueError: a graph is in use"
    heard("callback", by=[2], text=graph, kinds=["ValueError"])
    heard("callback", by=[0, 1, 3], text=f"rank 2: {graph}", kinds=["OthersFailedError"])
    heard("after resume", by=[0], text="no room for the graph", kinds=["ValueError"])
    heard("after resume", by=[1, 2, 3], text="rank 0: ValueError", kinds=["OthersFailedError"])
    where = "ncclCommDestroy failed (closing tp, tp_cp"
    heard("destroy", by=[1], text=where, kinds=["RuntimeError"])
    heard(
        "destroy", by=[0, 2, 3], text=f"rank 1: RuntimeError: {where}", kinds=["OthersFailedError"]
    )
    others = ["RendezvousError"]
    heard("ctrl-c", by=[0, 1, 3], text="failed: KeyboardInterrupt", kinds=others)
    heard("left before", by=[0, 2, 3], text="bad batch", kinds=others)
    heard("left between", by=[0, 2, 3], text="bad batch", kinds=others)
    slack = HURRIED + 20
    heard("late", by=[0, 1, 2, 3], text="rank 3", kinds=others, within=slack)


# -- a backend that fails --------------------------------------------------------------------------


def tired():
    dozing.install()
    told = []
    for what, on in (("suspend", 1), ("resume", 2)):
        session = megapg.session(tp=2, pp=2, backend="dozing", timeout=PATIENT)
        made = {dozing.of(g) for g in vars(session.groups).values() if g is not None}
        if me() == on:
            dozing.of(session.groups.tp).failing = (what,)
        if what == "resume":
            session.suspend()
        told.append(lost(session, getattr(session, what)))
        # the calls on the other communicators were tried
        assert all(what in backend.log for backend in made)
        del made
        dozing.forget()
    return told


def test_a_communicator_that_fails_is_named_and_the_others_are_attempted():
    for rank, told in enumerate(run_distributed(tired, 4, deadline=200)):
        for (said, kinds, _), on, what in zip(told, (1, 2), ("suspend", "resum"), strict=True):
            ranks = "(0, 1)" if on == 1 else "(2, 3)"
            where = f"RuntimeError: cuMemUnmap failed in {what}"
            assert where in said
            assert f"({what}ing tp, tp_cp, tp_dp, tp_dp_cp" in said or f"({what}ing tp" in said
            assert f"of ranks {ranks})" in said
            assert kinds == (["RuntimeError"] if rank == on else ["OthersFailedError"])
            assert rank == on or f"rank {on}: RuntimeError" in said


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["suspend", "close"])
def test_what_a_failure_held_goes_with_its_error(doing):
    """Otherwise the groups live until the next garbage collection, and so do gloo's waits."""

    def busy():
        raise RuntimeError("busy")

    def fail():
        session = megapg.session(tp=1)
        session.before_release(busy)
        with pytest.raises((OffloadError, RuntimeError), match="busy"), session:
            getattr(session, doing)()
        return weakref.ref(session)

    fail()  # the first imports leave reference cycles
    gc.collect()
    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()


def given_up_in_between():
    """One rank fails while the groups are suspended, and the others never resume."""
    dist.init_process_group("gloo")  # the store of this WORLD outlives the session
    expected = pytest.raises(ZeroDivisionError) if me() == 1 else contextlib.nullcontext()
    with expected, megapg.session(tp=2, pp=2, timeout=PATIENT) as session:
        session.suspend()
        if me() == 1:
            raise ZeroDivisionError("bad batch")
    if me() == 1:
        time.sleep(2.0)  # the others must not take the old message of rank 1 for its answer
    afresh()
    dist.destroy_process_group()


def test_a_rank_that_fails_between_is_not_held_against_the_next_session():
    run_distributed(given_up_in_between, 4, deadline=200)
