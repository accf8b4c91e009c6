"""Several sessions are suspended and resumed at once: all or none, for any set of ranks."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from asking import me, registered
from steps import Steps

import megapg
from megapg.collection import LeaseState
from megapg.errors import OffloadError, RendezvousError, SessionError, UnsupportedOffloadError
from megapg.testing import run_distributed

PATIENT, HURRIED = 60.0, 5.0
LIVE, SUSPENDED, FAILED = LeaseState.LIVE, LeaseState.SUSPENDED, LeaseState.FAILED


def works(session):
    total = torch.ones(1)
    dist.all_reduce(total, group=session.groups.mp)
    return total.item() == len(session.layout.ranks)


def opened():
    """Open a session over all four ranks, one over two of them, and two halves with one name."""
    half = range(2) if me() < 2 else range(2, 4)
    found = {"actor": megapg.session(tp=2, pp=2, name="actor", timeout=PATIENT)}
    if me() in (1, 2):
        found["critic"] = megapg.session(tp=2, ranks=(1, 2), name="critic", timeout=PATIENT)
    found["half"] = megapg.session(tp=2, ranks=half, name="half", timeout=PATIENT)
    return found


def close(sessions):
    for each in reversed(sessions.values()):
        each.close()
    assert not dist.is_initialized()


def states(sessions):
    return {each.state for each in sessions.values()}


def refused(doing, error, *texts):
    with pytest.raises(error) as caught:
        doing()
    for text in texts:
        assert text in str(caught.value), (text, str(caught.value))
    return caught.value


def jointly():
    sessions = opened()
    # Each rank passes the sessions in another order.
    names = list(sessions)[me() % 2 :] + list(sessions)[: me() % 2]
    given = [sessions[name] for name in names]
    everything = {name: each.groups for name, each in sessions.items()}
    ended = []
    for name in sessions:
        sessions[name].before_release(lambda name=name: ended.append(name))
        sessions[name].on_resume(lambda pg, name=name: ended.append(f"{name} is back"))

    for how in (None, "recreate"):
        ended.clear()
        reports = megapg.suspend(*given, how=how)
        assert [report.owner for report in reports] == [f"session {name!r}" for name in names]
        assert {report.how for report in reports} == {"recreate"}
        assert states(sessions) == {SUSPENDED}
        assert registered() == 1
        assert ended == sorted(sessions)
        ended.clear()
        reports = megapg.resume(*reversed(given))
        assert [report.owner for report in reports] == [f"session {n!r}" for n in reversed(names)]
        assert states(sessions) == {LIVE}
        assert ended == [f"{name} is back" for name in sorted(sessions)]
        assert all(each.groups is not everything[name] for name, each in sessions.items())
        assert all(map(works, sessions.values()))

    # If one session refuses, all refuse before any change.
    def unharmed():
        assert states(sessions) == {LIVE}
        assert ended == []
        assert all(map(works, sessions.values()))

    ended.clear()
    suspend = partial(megapg.suspend, *given)
    refused(
        lambda: megapg.suspend(*given, how="suspend"),
        UnsupportedOffloadError,
        "session 'actor' can't be suspended",
        "gloo keeps no memory",
    )
    unharmed()
    cannot = dict.fromkeys(("suspend", "recreate", "recreate world"), "a graph is in use")
    reluctant = sessions.get("critic") if me() == 2 else None
    if reluctant is not None:
        reluctant._cannot = lambda: dict(cannot)
    refused(suspend, UnsupportedOffloadError, "session 'critic' can't be", "in use (rank 2)")
    if reluctant is not None:
        del reluctant._cannot
    unharmed()
    some = [each for each in given if me() != 1 or each.name != "critic"]
    refused(
        lambda: megapg.suspend(*some), UnsupportedOffloadError, "rank 1 left out session 'critic'"
    )
    unharmed()
    # The same holds if the session over all ranks is left out: there may be another such session.
    wide = megapg.session(tp=4, name="another", timeout=PATIENT)
    some = [each for each in (*given, wide) if me() != 1 or each is wide or each.name != "actor"]
    started = time.monotonic()
    refused(
        lambda: megapg.suspend(*some), UnsupportedOffloadError, "rank 1 left out session 'actor'"
    )
    # Without any session over all ranks, the call waits for other ranks, and all get the error.
    some = given if me() != 1 else [each for each in given if each.name == "half"]
    refused(lambda: megapg.suspend(*some), RendezvousError, "sessions of ranks 0-3")
    assert time.monotonic() - started < PATIENT / 2
    wide.close()
    unharmed()
    ways = {"how": "recreate"} if me() == 3 else {}
    refused(
        lambda: megapg.suspend(*given, **ways), UnsupportedOffloadError, "how='recreate' (rank 3)"
    )
    unharmed()

    # No session covers all ranks: each rank gets an error at once, and nothing changes.
    part = [each for each in given if each.name != "actor"]
    started = time.monotonic()
    if me() in (1, 2):
        refused(lambda: megapg.suspend(*part), SessionError, "none of them has all the ranks")
    else:
        refused(lambda: megapg.suspend(*part), RendezvousError, "none of them has all the ranks")
    assert time.monotonic() - started < PATIENT / 2
    unharmed()

    # Some sessions are already suspended on some ranks.
    if "critic" in sessions:
        sessions["critic"].suspend()
    refused(suspend, UnsupportedOffloadError, "session 'critic' can't", "it is suspended")
    assert sessions["actor"].state is sessions["half"].state is LIVE
    refused(
        lambda: megapg.resume(*given), UnsupportedOffloadError, "session 'actor' can't be resumed"
    )
    if "critic" in sessions:
        sessions["critic"].resume()
    ended.clear()
    unharmed()

    for wrong in ((), (given[0], given[0]), ("actor",)):
        refused(lambda wrong=wrong: megapg.suspend(*wrong), SessionError, "suspend()")

    # As with one session, an error of earlier work is raised after all sessions are suspended.
    if me() == 1:
        sessions["half"].groups.lease.before_end.append(lambda error: 1 / 0)
        refused(suspend, ZeroDivisionError)
    else:
        suspend()
    assert states(sessions) == {SUSPENDED}
    megapg.resume(*given)
    close(sessions)
    return True


def test_all_are_suspended_or_none():
    assert run_distributed(jointly, 4, deadline=250) == [True] * 4


def fails(*_):
    raise ValueError("no room")


def lost():
    told, steps = {}, Steps()

    def lose(case, sessions, doing):
        with pytest.raises(OffloadError) as caught:
            doing(*sessions.values())
        told[case] = str(caught.value)
        assert states(sessions) == {FAILED}
        assert registered() == 1
        close(sessions)

    # A session over two ranks fails before and after the suspension.
    sessions = opened()
    if me() == 2:
        sessions["critic"].before_release(fails)
    lose("before", sessions, megapg.suspend)

    sessions = opened()
    megapg.suspend(*sessions.values())
    if me() == 2:
        sessions["critic"].on_resume(fails)
    lose("after", sessions, megapg.resume)

    # If a rank is missing, all sessions stay unchanged on every rank.
    sessions = opened()
    for session in sessions.values():
        session._timeout = HURRIED
    if me() == 3:
        steps.hear("given up", range(3))
    started = time.monotonic()
    error = refused(lambda: megapg.suspend(*sessions.values()), RendezvousError)
    assert time.monotonic() - started < HURRIED + 20
    steps.say("given up")
    told["late"] = str(error)
    assert states(sessions) == {LIVE}
    assert all(map(works, sessions.values()))
    megapg.suspend(*sessions.values())
    megapg.resume(*sessions.values())
    assert all(map(works, sessions.values()))
    close(sessions)
    return told


def test_a_failure_in_one_fails_all_of_them_everywhere():
    for rank, told in enumerate(run_distributed(lost, 4, deadline=250)):
        for case in ("before", "after"):
            assert "ValueError: no room" in told[case], (rank, case, told[case])
            assert rank == 2 or "rank 2" in told[case], (rank, case, told[case])
            assert "session 'actor' and session" in told[case]
        assert rank == 3 or "rank 3" in told["late"]
