"""session.check(): every rank answers over the store, and optionally over each communicator."""

import re
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from asking import me, works
from steps import Steps

import megapg
from megapg.collection import LeaseState
from megapg.errors import RendezvousError, SessionError
from megapg.testing import run_distributed

PATIENT, HURRIED = 60.0, 6.0


def checked():
    steps = Steps()
    with megapg.session(tp=2, pp=2, timeout=PATIENT) as session:
        report = session.check()
        assert report.ranks == (0, 1, 2, 3)
        assert report.communicators == ()
        assert 0 <= report.seconds < PATIENT
        assert str(report).startswith("session 'default': 4 ranks answered within ")

        # The check does not use the groups: a group may be busy meanwhile.
        if me() >= 2:
            time.sleep(1)
        busy = dist.all_reduce(torch.ones(1), group=session.groups.mp, async_op=True)
        session.check(reason="before the evaluation")
        busy.wait()

        report = session.check(communicators=True, reason="before step 1")
        assert report.reason == "before step 1"
        groups = {f for c in report.communicators for f in c.fields} - {"WORLD"}
        assert groups == {f for f in groups if session.groups.size(f) > 1}
        assert {"tp", "pp", "mp"} <= groups
        assert [c.fields for c in report.communicators] == sorted(
            c.fields for c in report.communicators
        )
        assert "(before step 1)" in str(report)

        # Every rank names the late rank, even the late rank itself. Then the check works again.
        if me() == 1:
            steps.hear("given up", (0, 2, 3))
        started = time.monotonic()
        with pytest.raises(RendezvousError) as late:
            session.check(HURRIED, "at step 7")
        assert time.monotonic() - started < HURRIED + 15
        steps.say("given up")
        assert late.value.missing == (1,)
        assert str(late.value).startswith("at step 7: ")
        assert "rank 1" in str(late.value)
        assert (f"did not come within {HURRIED:g} s" if me() != 1 else "came too late") in str(
            late.value
        )
        assert session.check().ranks == (0, 1, 2, 3)
        assert works(session.groups.mp, 4)

        # A rank that calls with other arguments is named, too.
        with pytest.raises(RendezvousError, match=r"rank . came for check\("):
            session.check(communicators=me() == 2)
        session.check()

        for wrong in (0, -1, "soon", float("nan")):
            with pytest.raises(SessionError, match="give the seconds to wait"):
                session.check(wrong)
        session.suspend()
        with pytest.raises(SessionError, match="was suspended"):
            session.check()
        session.resume()
        session.check(communicators=True)
    with pytest.raises(SessionError, match="was closed"):
        session.check()
    return True


def test_every_rank_answers_or_is_named():
    assert run_distributed(checked, 4, deadline=200) == [True] * 4


def unwell():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    session = megapg.session(tp=2, timeout=PATIENT)
    assert works(session.groups.tp, 2)
    assert works(session.groups.dp, 2)

    # All ranks arrive, but a thread of one rank is stuck and does not join a collective.
    if me() == 3:
        stuck = threading.Event()

        def probe(*_, **__):
            stuck.wait(HURRIED + 30)
            return dist.Work()

        original, dist.all_reduce = dist.all_reduce, probe
    with pytest.raises(RendezvousError) as failed:
        session.check(HURRIED, "before step 2", communicators=True)
    if me() == 3:
        dist.all_reduce = original
        stuck.set()
    told = str(failed.value)
    assert told.startswith("before step 2: session 'default': check() failed: ")
    # Rank 1 reports this, or a rank that got further and waits for rank 1.
    assert re.findall(r"of ranks ([\d, ]+) did not answer", told)[0] == "1, 3", told
    assert "of ranks 0" not in told.partition("did not answer")[0], told
    assert session.state is LeaseState.FAILED
    session.close()

    dist.destroy_process_group()
    return True


def test_what_does_not_answer_is_named():
    assert run_distributed(unwell, 4, deadline=200) == [True] * 4


def test_alone_everybody_is_well(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with megapg.session() as session:
        assert session.check(communicators=True).ranks == (0,)
