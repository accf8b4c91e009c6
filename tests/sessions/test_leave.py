"""A rank that ends its groups alone: the rank waits for no other rank and leaves nothing behind."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from asking import me, registered
from recording import fake_world

import megapg
from megapg.errors import RendezvousError, StaleGroupError
from megapg.ownership import suspension
from megapg.ownership.closing import leave
from megapg.ownership.opening import open_sessions
from megapg.testing import run_distributed


def leaving_one_after_the_other(over):
    """Rank 0 leaves first. Rank 1 gets an error from a later call, and then leaves."""
    session = megapg.session(tp=2, timeout=30)
    heard = []
    session.before_release(partial(heard.append, "released"))
    dist.all_reduce(torch.ones(1), group=session.groups.tp)
    inner = megapg.session(pp=2, name="inner", timeout=30)
    groups, answer = session.groups, ""
    if me() == 1:
        while not Path(over).exists():
            time.sleep(0.01)
        with pytest.raises(RendezvousError) as caught:
            session.check()
        answer = str(caught.value)
    leave(session)
    Path(over).touch()
    leave(session)  # nothing is left to do
    with pytest.raises(StaleGroupError, match="were closed at"):
        groups.require("tp")
    assert inner.closed
    return heard, answer, len(open_sessions()), dist.is_initialized()


def test_a_rank_leaves_alone_and_the_others_hear_of_it(tmp_path):
    first, second = run_distributed(
        partial(leaving_one_after_the_other, str(tmp_path / "over")), 2, deadline=60
    )
    assert first == (["released"], "", 0, False)
    assert second[0] == ["released"]
    assert "rank 0" in second[1]
    assert "has left" in second[1]
    assert second[2:] == (0, False)


def one_leaves_and_the_others_close(who, over):
    """One rank leaves before the others close, or while they wait with a long timeout."""
    took = []
    for in_time in (True, False):
        session = megapg.session(tp=2, pp=2, name=f"in time: {in_time}", timeout=300)
        works = torch.ones(1)
        dist.all_reduce(works, group=session.groups.mp)
        gone = Path(f"{over} {in_time}")
        if me() == who:
            if not in_time:
                time.sleep(0.5)
            leave(session)
            gone.touch()
        else:
            while in_time and not gone.exists():
                time.sleep(0.01)
            session.close()
        took.append((session.closed, registered()))
    return took, len(open_sessions())


def test_who_closes_waits_for_none_that_left(tmp_path):
    ran = run_distributed(
        partial(one_leaves_and_the_others_close, 0, str(tmp_path / "over")), 4, deadline=100
    )
    assert ran == [([(True, 0)] * 2, 0)] * 4


def test_a_device_that_does_not_finish_is_not_waited_for_forever(monkeypatch):
    """The device never finishes, as if the other rank had died in a collective."""
    never = threading.Event()
    monkeypatch.setattr(suspension, "_on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: never.wait())
    with fake_world(0, 2):
        session = megapg.session(tp=2, timeout=0.1)
        with pytest.raises(RendezvousError, match="rank 0 began on the device did not end within"):
            leave(session)
        assert session.closed
        assert registered() == 1
    never.set()


def test_every_error_is_told(monkeypatch):
    with fake_world(0, 2):
        session = megapg.session(tp=2)

        @session.before_release
        def fail():
            raise LookupError("one")

        @session.before_release
        def fail_too():
            raise ZeroDivisionError("two")

        with pytest.raises(LookupError, match="one") as caught:
            leave(session)
        assert any("ZeroDivisionError('two')" in note for note in caught.value.__notes__)
        assert session.closed
        assert registered() == 1
