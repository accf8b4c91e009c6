"""suspend() or resume() fails on one rank: every rank gets the reason, and all can start afresh."""

import contextlib
import gc
import os
import threading
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
    RendezvousError,
    SessionError,
    StaleGroupError,
    TeardownError,
)
from megapg.rendezvous import gathering, parting, rendezvous
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.store import Store, host_of
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
    session = opened()
    session.suspend()
    session._timeout = HURRIED
    told["late for resume"] = lost(session, partial(late, session.resume))

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
    heard("late for resume", by=[0, 1, 2], text="rank 3", kinds=others, within=slack)


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


# -- the exchange ----------------------------------------------------------------------------------


def shared_store():
    store = dist.HashStore()
    return Store(store, host_of(store, "the test's store"))


def test_ranks_that_came_for_different_things_hear_so():
    store, said = shared_store(), {}

    def take_part(rank):
        coordinator = Coordinator(store, "talk", rank, range(3))
        coordinator.meet({}, timeout=PATIENT)
        coordinator.confirm(None, timeout=PATIENT)
        first = coordinator.exchange("tea", f"milk {rank}", timeout=PATIENT)
        coordinator.exchange("tea", "", timeout=PATIENT)
        turns = [key for key in store.torch.list_keys() if "/turn " in key]
        try:
            coordinator.exchange("tea" if rank else "coffee", "", timeout=PATIENT)
        except RendezvousError as error:
            said[rank] = first, str(error), error.missing, len(turns)

    ranks = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(PATIENT)
    assert {rank: s[0] for rank, s in said.items()} == {
        rank: {0: "milk 0", 1: "milk 1", 2: "milk 2"} for rank in range(3)
    }
    assert "rank 1 came for tea; rank 2 came for tea" in said[0][1]
    assert "rank 0 came for coffee" in said[1][1]
    assert [said[rank][2] for rank in range(3)] == [(1, 2), (0,), (0,)]
    assert max(s[3] for s in said.values()) <= 8  # earlier messages are deleted


@pytest.mark.parametrize(
    ("said", "named", "missing"),
    [
        (ValueError("bad batch"), {2}, (2,)),
        # This error results from another rank's failure, and torch does not name that rank.
        (RuntimeError("[/src/gloo/gloo/tcp/pair.cc:1] Connection closed by peer"), {1, 2}, (1,)),
    ],
)
def test_who_is_late_is_not_blamed_for_who_has_left(said, named, missing):
    """The ranks do not wait for rank 1 until the timeout, and no error claims that they did."""
    store, heard, told = shared_store(), {}, threading.Event()

    def take_part(rank):
        coordinator = Coordinator(store, "talk", rank, range(3))
        coordinator.meet({}, timeout=PATIENT)
        coordinator.confirm(None, timeout=PATIENT)
        if rank == 2:
            coordinator.part(said, timeout=PATIENT)
            return
        if rank == 1:
            assert told.wait(PATIENT)
        try:
            coordinator.exchange("tea", "", timeout=PATIENT)
        except RendezvousError as error:
            heard[rank] = error
        told.set()

    played_by({rank: partial(take_part, rank) for rank in range(3)})
    text = str(heard[0])
    assert {rank for rank in range(3) if f"rank {rank}" in text} == named, text
    assert "did not come within" not in text
    assert heard[0].missing == missing
    assert "rank 2" in str(heard[1])
    assert "rank 1" not in str(heard[1])
    assert heard[1].missing == (2,)


def played_by(threads):
    """Run these functions at the same time; return the result or the exception of each."""
    said = {}

    def play(rank, work):
        try:
            said[rank] = work()
        except Exception as error:
            said[rank] = error

    ranks = [threading.Thread(target=play, args=item) for item in threads.items()]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(2 * PATIENT)
    return said


@pytest.mark.parametrize("where", ["exchange", "confirm", "part"])
def test_where_one_has_given_up_nobody_goes_on(where, monkeypatch):
    """The other ranks come later, and by their own clocks all are in time."""
    for module in (gathering, parting, rendezvous):
        monkeypatch.setattr(module, "GRACE", 0.1)
    store = shared_store()
    ranks = [Coordinator(store, "talk", rank, range(3)) for rank in range(3)]
    played_by({r: partial(ranks[r].meet, {}, timeout=PATIENT) for r in range(3)})
    if where != "confirm":
        played_by({r: partial(ranks[r].confirm, None, timeout=PATIENT) for r in range(3)})
    arguments = ("tea", "milk") if where == "exchange" else (None,)

    def come(those, timeout):
        return played_by(
            {r: partial(getattr(ranks[r], where), *arguments, timeout=timeout) for r in those}
        )

    said = come([1], 0.1) | come([0, 2], PATIENT)
    for rank in range(3):
        heard = said[rank]
        assert heard if where == "part" else isinstance(heard, RendezvousError), (rank, heard)


def test_a_follower_that_gives_up_confirming_names_who_is_to_blame(monkeypatch):
    """The error does not name the leader, which is present and waits for the same rank."""
    for module in (gathering, parting, rendezvous):
        monkeypatch.setattr(module, "GRACE", 0.1)
    store = shared_store()
    ranks = [Coordinator(store, "talk", rank, range(4)) for rank in range(4)]
    played_by({r: partial(ranks[r].meet, {}, timeout=PATIENT) for r in range(4)})

    def give_up():
        while sum("/ready/" in key for key in store.list_keys()) < 2:
            time.sleep(0.01)
        ranks[1].confirm(None, timeout=0.1)

    said = played_by(
        {
            0: partial(ranks[0].confirm, None, timeout=HURRIED),
            1: give_up,
            3: partial(ranks[3].confirm, RuntimeError("out of memory"), timeout=PATIENT),
        }
    )
    for rank in (0, 1):
        assert said[rank].missing == (2, 3)
        assert "rank 2: did not confirm in time; rank 3: RuntimeError: out of" in str(said[rank])


def test_attempts_are_counted_alike_once_all_have_met(monkeypatch):
    """Otherwise a message of an earlier attempt would be taken for one of the current attempt."""
    store = shared_store()

    def opened(rank, ranks):
        coordinator = Coordinator(store, "talk", rank, ranks)
        coordinator.meet({}, timeout=PATIENT)
        coordinator.confirm(None, timeout=PATIENT)
        return coordinator.part(None, timeout=PATIENT)

    assert played_by({r: partial(opened, r, range(2)) for r in range(2)}) == {0: {}, 1: {}}
    everyone = {r: partial(opened, r, range(3)) for r in range(3)}
    assert played_by(everyone) == {0: {}, 1: {}, 2: {}}
    bad = partial(Coordinator(store, "talk", 0, range(3)).decline, ValueError("bad argument"))
    heard = played_by({**everyone, 0: bad})
    assert all("bad argument" in str(heard[rank]) for rank in (1, 2))
    late = {**everyone, 0: lambda: (time.sleep(1.0), everyone[0]())[1]}
    assert played_by(late) == {0: {}, 1: {}, 2: {}}


def test_a_refusal_among_other_ranks_ends_no_meeting():
    """Rank 0 has declined more often under this name than rank 2 has called."""
    store = shared_store()
    for _ in range(3):
        Coordinator(store, "talk", 0, range(2)).decline(ValueError("bad argument"))
    here = threading.Event()

    def come(rank):
        coordinator = Coordinator(store, "talk", rank, range(3))
        if rank == 0:
            assert here.wait(PATIENT)
            time.sleep(1.0)  # rank 2 looks for its leader meanwhile
        elif rank == 2:
            here.set()
        coordinator.meet({}, timeout=PATIENT)
        coordinator.confirm(None, timeout=PATIENT)
        return coordinator.part(None, timeout=PATIENT)

    assert played_by({r: partial(come, r) for r in range(3)}) == {0: {}, 1: {}, 2: {}}


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
