"""suspend() and resume(): the methods, the agreement, and which objects stay valid."""

import gc
import os
import re
import weakref
from datetime import timedelta
from functools import partial
from unittest import mock

import dozing
import pytest
import torch
import torch.distributed as dist
from asking import registered

import megapg
from megapg import torch_private
from megapg.collection import LeaseState
from megapg.errors import SessionError, StaleGroupError, UnsupportedOffloadError
from megapg.ownership import suspension
from megapg.testing import run_distributed

pytestmark = pytest.mark.torch


def works(session):
    """True if a collective on every group of this rank gives the right sum."""
    for field in session.groups.present():
        group = getattr(session.groups, field)
        if isinstance(group, dist.ProcessGroup):
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            if total.item() != session.groups.size(field):
                return False
    return True


def refused(doing, error=UnsupportedOffloadError):
    with pytest.raises(error) as caught:
        doing()
    return str(caught.value)


def shape(pg):
    """Return the properties of a collection that must be equal in every generation."""
    named = {f: getattr(pg, f) for f in pg.present()} | dict(pg.extras)
    shared = {}
    for field, group in named.items():
        shared.setdefault(id(group), []).append(field)
    options = {
        field: dozing.of(group).options._timeout
        for field, group in named.items()
        if isinstance(group, dist.ProcessGroup)
    }
    return pg.describe(), sorted(shared.values()), options


# -- recreate --------------------------------------------------------------------------------------


def recreated():
    session = megapg.session(
        tp=2,
        timeout=60,
        collective_timeout=timedelta(seconds=47),
        dedicated=("tp",),
        gloo=("dp_cp",),
        hybrid_cp=True,
    )
    before = registered()
    pg = session.groups
    was, looked = pg.lease, shape(pg)
    old = weakref.ref(pg.tp)
    called, heirs = [], []
    session.before_release(lambda: called.append("release"))
    session.before_release(lambda: called.append("release too"))
    session.on_resume(lambda groups: called.append(groups is session.groups))
    was.at_succession.append(heirs.append)
    assert "Call suspend() first" in refused(session.resume, SessionError)

    report = session.suspend()
    assert (report.how, report.action, report.bytes) == (
        "recreate",
        "suspended",
        {"gloo": (None, None)},
    )
    assert (report.communicators, report.groups_gone, report.free) == (
        before - 1,
        before - 1,
        (None, None),
    )
    assert list(report.seconds) == ["agree", "callbacks", "finish", "destroy", "part"]
    assert "gloo: memory unknown" in str(report)
    assert registered() == 1
    assert called == ["release", "release too"]
    assert session.state is LeaseState.SUSPENDED
    assert "suspended by 'recreate'" in repr(session)
    assert session.describe()["state"] == "suspended"
    for use in (lambda: session.groups, session.suspend, session.rebind):
        assert "Call resume() first" in refused(use, SessionError)
    assert "were closed" in refused(partial(pg.require, "tp"), StaleGroupError)
    assert not pg.holds(("tp",))

    report = session.resume()
    assert (report.how, report.action, report.groups_gone) == ("recreate", "resumed", 1 - before)
    assert called[2:] == [True]
    assert session.generation == 2
    assert session.groups is not pg
    assert session.groups != pg
    assert heirs == [session.groups]
    assert shape(session.groups) == looked
    assert works(session)
    assert "generation 2 has taken their place" in refused(
        partial(pg.require, "tp"), StaleGroupError
    )
    assert "generation 2 has taken their place" in refused(
        partial(getattr, pg, "tp"), StaleGroupError
    )
    former = vars(pg)["tp"]
    assert session.groups.tp.group_desc == former.group_desc.replace("/1:", "/2:")

    # Only the user keeps the old groups alive, and rebind() knows them as long as they live.
    holder = {"pg": pg, "tp": former}
    del heirs, was, former
    session.suspend("recreate")
    session.resume()
    rebound = session.rebind(holder)
    assert holder == {"pg": session.groups, "tp": session.groups.tp}
    assert len(rebound.replaced) == 2
    del pg
    gc.collect()
    assert old() is None
    holder.clear()
    del rebound
    assert session.live_references() == []

    # If one rank asks for another method, or can't suspend, no rank suspends and nothing changes.
    generation = session.generation
    told = [
        refused(lambda: session.suspend("suspend")),
        refused(lambda: session.suspend("nap")),
        refused(lambda: session.suspend(["recreate"])),
        refused(lambda: session.suspend("recreate world" if session.rank == 3 else None)),
    ]
    with mock.patch.multiple(
        torch.cuda,
        is_initialized=lambda: session.rank == 3,
        is_current_stream_capturing=lambda: True,
        create=True,
    ):
        told.append(refused(session.suspend))
    mine = dist.new_group([0, 1])
    told.append(refused(lambda: session.suspend("recreate world")))
    if session.rank < 2:
        dist.destroy_process_group(mine)
    del mine
    assert session.state is LeaseState.LIVE
    assert session.generation == generation
    assert works(session)

    # Earlier work such as a background save finishes first; its error is passed on.
    def finish(error):
        works(session)
        raise ZeroDivisionError(f"the save failed, {error}")

    session.groups.lease.before_end.append(finish)
    assert refused(session.suspend, ZeroDivisionError) == "the save failed, None"
    assert session.state is LeaseState.SUSPENDED
    session.resume()
    assert works(session)

    # WORLD is destroyed as well if only this session uses it.
    holder = {"world": dist.group.WORLD}
    world = weakref.ref(dist.group.WORLD)
    report = session.suspend("recreate world")
    assert not dist.is_initialized()
    assert report.groups_gone == before
    assert report.communicators == before
    assert not session.owns_world
    session.resume()
    assert session.owns_world
    session.rebind(holder)
    assert holder["world"] is dist.group.WORLD
    assert works(session)
    holder.clear()
    assert world() is None

    # A session may end suspended or not, with or without an error.
    session.suspend()
    session.close()
    assert session.closed
    assert not dist.is_initialized()
    assert "Open a new one" in refused(session.suspend, SessionError)
    session = megapg.session(tp=4, timeout=60)
    with pytest.raises(ZeroDivisionError), session:
        1 / session.suspend("recreate world").communicators / 0
    assert session.closed

    # A suspended session still needs WORLD.
    with megapg.session(tp=2, name="outer", timeout=60) as outer:
        with megapg.session(pp=4, name="inner", timeout=60) as inner:
            inner.suspend()
            assert "'inner', which is suspended" in refused(lambda: outer.suspend("recreate world"))
            inner.resume()
            assert works(inner)
            inner.suspend()
        outer.suspend("recreate world")
        outer.resume()
        assert works(outer)

    # In the caller's WORLD, together with another session.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.PrefixStore("callers", store)
    dist.init_process_group("gloo", store=store, rank=session.rank, world_size=4)
    theirs = dist.group.WORLD
    with megapg.session(tp=2, timeout=60) as outer:
        with megapg.session(pp=4, name="inner", timeout=60) as inner:
            told.append(refused(lambda: outer.suspend("recreate world")))
            outer.suspend()
            assert works(inner)
            inner.suspend()
            outer.resume()
            assert works(outer)
            inner.resume()
            assert works(inner)
        assert works(outer)
    assert dist.group.WORLD is theirs
    assert registered() == 1
    dist.barrier()
    dist.destroy_process_group()
    return told


def test_groups_are_destroyed_and_made_anew_alike_on_all_ranks():
    told = run_distributed(recreated, 4, deadline=200)
    assert all(each == told[0] for each in told[:2])
    for gloo, nap, pillow, mixed, capture, bystander, callers in told:
        assert "gloo keeps no memory that could be suspended (ranks 0, 1, 2, 3)" in gloo
        assert "there is no such way; the ways are suspend, recreate, recreate world" in nap
        assert "not by \"['recreate']\", since there is no such way" in pillow
        assert "how=None (ranks 0, 1, 2); how='recreate world' (rank 3)" in mixed
        assert "a CUDA graph is being captured; suspend before or after (rank 3)" in capture
        assert "others have groups on WORLD" in bystander
        assert "Nothing was touched" in callers
        assert "WORLD is not the session's to destroy" in callers


def played():
    from megapg.layout import ParallelLayout
    from megapg.ownership.opening import fake_session

    called = []
    with fake_session(ParallelLayout(world_size=64, tp=4, pp=4), 17) as session:
        session.before_release(lambda: called.append(session.state.value))
        looked = session.groups.describe()
        session.suspend()
        session.resume()
        assert session.generation == 2
        assert session.groups.describe() == looked
        assert called == ["live"]
    assert called == ["live", "live"]
    closing = fake_session(ParallelLayout(world_size=64, tp=4, pp=4), 17)
    closing.before_release(lambda: 1 // 0)
    closing.before_release(lambda: called.append("all the same"))
    with pytest.raises(ZeroDivisionError):
        closing.close()
    assert closing.closed

    def fails(error):
        raise OSError("the save failed")

    for end, expected in (("suspend", megapg.errors.OffloadError), ("close", OSError)):
        both = fake_session(ParallelLayout(world_size=64, tp=4, pp=4), 17)
        both.groups.lease.before_end.append(fails)
        both.before_release(lambda: 1 // 0)
        with pytest.raises(expected) as caught:
            getattr(both, end)()
        error = caught.value
        told = [*getattr(error, "exceptions", [error]), *getattr(error, "__notes__", [])]
        assert {"OSError", "ZeroDivisionError"} <= {
            name for each in map(repr, told) for name in re.findall(r"\w+Error", each)
        }
        both.close()
    return called


def test_a_session_that_is_played_suspends_too():
    assert run_distributed(played, 1) == [["live", "live", "all the same"]]


# -- suspend ---------------------------------------------------------------------------------------


def communicators(session):
    return {id(g): dozing.of(g) for g in vars(session.groups).values() if g is not None}.values()


def dozed():
    me = int(os.environ["RANK"])
    dozing.install()
    session = megapg.session(tp=2, backend="dozing", gloo=("dp_cp",), timeout=60)
    pg, made = session.groups, list(communicators(session))
    world = dozing.of(dist.group.WORLD)
    called = []
    session.before_release(lambda made=made: called.append([b.asleep for b in made]))
    session.on_resume(called.append)
    before = registered()

    report = session.suspend()
    sleepers = len(made) + 1
    assert report.how == "suspend"
    assert report.groups_gone == 0
    assert report.communicators == sleepers + 1  # the gloo companion has no memory to release
    held = (sleepers * (dozing.GIVEN_BACK + dozing.KEPT), sleepers * dozing.KEPT)
    assert report.bytes == {"dozing": held, "gloo": (None, None)}
    assert f"dozing: {held[0]} bytes before, {held[1]} bytes after" in str(report)
    assert all(backend.asleep for backend in (*made, world))
    assert called == [[False] * len(made)]
    assert registered() == before
    assert pg.lease.state is LeaseState.SUSPENDED
    assert "were suspended" in refused(partial(pg.require, "tp"), StaleGroupError)
    assert "Call resume() first" in refused(lambda: session.groups, SessionError)

    report = session.resume()
    assert report.bytes == {"dozing": held[::-1], "gloo": (None, None)}
    assert session.groups is pg
    assert called[1:] == [pg]
    assert session.generation == pg.lease.generation == 1
    assert pg.require("tp") is pg
    assert pg.holds(("tp",))
    assert not any(backend.asleep for backend in (*made, world))
    assert works(session)
    assert session.rebind({"pg": pg}).replaced == ()
    assert all(backend.log == ["suspend", "resume"] for backend in (*made, world))

    # The other methods work on request, from the same state.
    assert session.suspend("recreate").bytes["dozing"] == (
        held[0] * (sleepers - 1) // sleepers,
        None,
    )
    session.resume()
    assert session.groups is not pg
    session.suspend("recreate world")
    session.resume()
    assert session.suspend().how == "suspend"
    session.close()  # closes while suspended
    del pg, made, world
    dozing.forget()

    # If one rank can't suspend, all use the next method; an explicit request raises instead.
    told = []
    dozing.install("NCCL 2.21.5 can't suspend a communicator; 2.29.7 can" if me == 1 else "")
    with megapg.session(tp=2, backend="dozing", timeout=60) as session:
        told.append(refused(lambda: session.suspend("suspend")))
        assert session.suspend().how == "recreate"
        session.resume()
        assert works(session)
    dozing.install()
    with megapg.session(tp=2, backend="cpu:dozing,cuda:gloo", timeout=60) as session:
        assert session.suspend().how == "suspend"
        session.resume()
        assert works(session)
        if me == 3:
            for backend in communicators(session):
                backend.memory_stats = mock.Mock(side_effect=RuntimeError("built without it"))
        told.append(refused(lambda: session.suspend("suspend")))
    return told


def test_a_backend_that_can_is_suspended_in_place():
    for by_version, by_probe in run_distributed(dozed, 4, deadline=200):
        assert "NCCL 2.21.5 can't suspend a communicator; 2.29.7 can (rank 1)" in by_version
        assert "built without it (rank 3)" in by_probe


@pytest.mark.parametrize(
    ("nccl", "environment", "reason"),
    [
        (None, {}, "built without NCCL"),
        ((2, 21, 5), {}, "NCCL 2.21.5 can't suspend a communicator; 2.29.7 can"),
        ((2, 30, 7, "cu13"), {"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE=0"),
        ((2, 29, 7), {}, ""),
    ],
)
def test_whether_nccl_can_be_suspended_is_told_by_versions(monkeypatch, nccl, environment, reason):
    monkeypatch.setattr(torch_private, "can_suspend", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl is not None)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for spelling in ("nccl", "cpu:gloo,cuda:nccl"):
        told = suspension.cannot_suspend([spelling])
        assert reason in told
        assert bool(told) == bool(reason)
    assert suspension.cannot_suspend(["gloo"]) == "gloo keeps no memory that could be suspended"
    monkeypatch.setattr(torch_private, "can_suspend", lambda: False)
    assert "can't suspend a communicator; 2.13 can" in suspension.cannot_suspend(["nccl"])
