"""The rendezvous of simulated ranks: any rank may be late, absent, different, dead or wrong.

Each rank runs the real code on a store in memory with a simulated clock, so no test takes the time
that it simulates. Few ranks and many ranks use different code to find who has arrived.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("greenlet")

from benchmarks.simulated import Simulation
from megapg.errors import LayoutMismatchError, RendezvousError, SessionError
from megapg.rendezvous import gathering, rendezvous
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.gathering import LARGE
from megapg.rendezvous.joint_work import CancelledError, JointWork

FEW, MANY = 5, LARGE + 6
MEMBER = 3
TIMEOUT, TEAM_TIMEOUT = 20.0, 30.0
# Followers wait a little longer than the leader, and all ranks begin within a second.
GRACE = 5.0
GLOO = RuntimeError("[/src/gloo/gloo/tcp/pair.cc:1] Connection closed by peer")


class Job:
    """Simulated ranks, their work and their results."""

    def __init__(self, size: int) -> None:
        self.simulation = Simulation(size)
        self.stores = [self.simulation.store() for _ in range(size)]
        self.ranks = range(size)
        self.wait = self.simulation.sleep
        self.begin_anew()
        self.teams = [
            JointWork(store, "work", rank, self.ranks, timeout=TEAM_TIMEOUT)
            for rank, store in enumerate(self.stores)
        ]

    def begin_anew(self) -> None:
        """Create new coordinators, as processes that open another session."""
        self.sessions = [Coordinator(s, "job", r, self.ranks) for r, s in enumerate(self.stores)]

    def each(self, do, *, within: float = TIMEOUT) -> list:
        """Return the result or the exception of ``do(session)`` on each rank."""
        ends = dict.fromkeys(self.ranks)

        def one(rank: int) -> None:
            try:
                ends[rank] = do(self.sessions[rank])
            except Exception as error:
                ends[rank] = error

        self.phase = self.simulation.phase(one)
        assert self.phase.most("ended") <= within + GRACE
        return [ends[rank] for rank in self.ranks]

    def opened(self):
        assert self.each(open_) == [None] * len(self.ranks)
        return self

    def others(self, ends: list, *ranks: int) -> list[str]:
        """Return the errors of the ranks that are not to blame, which must name those that are."""
        errors = [end for rank, end in enumerate(ends) if rank not in ranks]
        assert all(isinstance(error, RendezvousError) for error in errors), errors
        assert {error.missing for error in errors} <= {ranks}, errors
        return [str(error) for error in errors]

    def left(self) -> set[str]:
        """Return the keys left in the store, except the last message of each rank."""
        return {key for key in self.simulation.values if "/hello/" not in key}


@pytest.fixture(params=[FEW, MANY], ids=["few", "many"])
def job(request):
    return Job(request.param)


any_rank = pytest.mark.parametrize("who", [0, MEMBER])


def open_(session, problem=None, **settings):
    session.meet({"tp": "8", **settings}, timeout=TIMEOUT)
    session.confirm(problem, timeout=TIMEOUT)


def part(session, problem=None):
    return session.part(problem, timeout=TIMEOUT)


# -- meeting ---------------------------------------------------------------------------------------


@any_rank
def test_a_rank_that_never_comes_is_named_and_may_come_later(job, who):
    ends = job.each(lambda s: s._rank == who or open_(s))
    for said in job.others(ends, who):
        assert f"Missing: rank {who} never arrived" in said
    job.begin_anew()
    job.opened()


@any_rank
def test_a_rank_may_come_late_and_nothing_stays_in_the_store(job, who):
    assert not any(job.each(lambda s: late(job, s, who, 15) or open_(s)))
    assert not any(job.each(lambda s: late(job, s, who, 15) or part(s)))
    assert job.left() == set()


def late(job, session, who, seconds):
    if session._rank == who:
        job.wait(seconds)


@any_rank
def test_other_settings_are_named_on_every_rank(job, who):
    ends = job.each(lambda s: open_(s, tp="4" if s._rank == who else "8"), within=10)
    for error in ends:
        assert isinstance(error, LayoutMismatchError)
        assert f"4 on rank {who}" in str(error)
        assert set(error.differences["tp"]) == set(job.ranks)


@any_rank
def test_the_highest_generation_counts(job, who):
    def meet(session):
        at_least = 7 if session._rank == who else 1
        return session.meet({}, timeout=TIMEOUT, at_least=at_least).generation

    assert set(job.each(meet, within=10)) == {7}


def test_a_rank_in_an_older_generation_is_told_both_numbers(job):
    job.opened()
    forgetful = job.ranks[-1]
    del job.simulation.values[f"megapg/job/hello/{forgetful}"]
    job.sessions[forgetful] = Coordinator(job.stores[forgetful], "job", forgetful, job.ranks)
    ends = job.each(lambda s: s._rank == forgetful and open_(s))
    assert isinstance(ends[forgetful], SessionError)
    assert "would open generation 1, but rank 0 on " in str(ends[forgetful])
    assert "is live in generation 1" in str(ends[forgetful])


@any_rank
@pytest.mark.parametrize("last", [None, 1])
def test_nobody_waits_for_a_rank_that_declines_and_it_may_come_later(job, who, last):
    """A rank that comes when the others have given up gets the reason, too."""

    def come(session):
        if session._rank == who:
            job.wait(5)
            session.decline(ValueError("no GPU"))
        else:
            late(job, session, last, 10)
            open_(session)

    ends = job.each(come, within=15)
    for said in job.others(ends, who):
        assert f"rank {who} on" in said
        assert said.count("gave up: ValueError: no GPU") == 1
        assert "in time" not in said
        assert "raise timeout" not in said
    job.begin_anew()
    job.each(lambda s: late(job, s, who, 1) or open_(s))  # the others look at its last message
    assert not any(job.each(part))


def test_the_message_of_a_failed_attempt_does_not_count_for_the_next(job):
    """Rank 1 is slow to read that the attempt failed, and the leader tries again at once."""

    def come(session):
        if session._rank == MEMBER:
            job.wait(6)
        else:
            peek = session._store.peek
            if session._rank == 1:
                session._store.peek = lambda key: (key[0] == "v" and job.wait(4)) or peek(key)
            with pytest.raises(RendezvousError, match=f"rank {MEMBER} never arrived"):
                session.meet({"tp": "8"}, timeout=5)
            session._store.peek = peek
        open_(Coordinator(session._shared, "job", session._rank, job.ranks))

    assert not any(job.each(come))


def test_refusals_among_other_ranks_end_no_meeting():
    """Rank 0 has declined more often under this name than rank 2 has called."""
    job = Job(3)
    for _ in range(3):
        job.each(lambda s: s._rank or decline_among(job, range(2)))
    job.begin_anew()
    assert not any(job.each(lambda s: late(job, s, 0, 1) or open_(s)))


def decline_among(job, ranks):
    Coordinator(job.stores[0], "job", 0, ranks).decline(ValueError("bad argument"))


def test_attempts_are_counted_alike_once_all_have_met():
    """Otherwise a message of an earlier attempt would be taken for one of the current attempt."""
    job = Job(3)
    for rank in (0, 1):
        job.sessions[rank] = Coordinator(job.stores[rank], "job", rank, range(2))
    assert not any(job.each(lambda s: s._rank == 2 or open_(s) or part(s))[:2])

    def meet(session):
        late(job, session, 0, 1)
        open_(session)
        return part(session)

    def refuse(session):
        refusing = session._rank == 2  # it has called less often than the others
        return session.decline(ValueError("bad argument")) if refusing else meet(session)

    for come in (meet, refuse, meet):
        job.begin_anew()
        ends = job.each(come, within=5)
        assert all(("bad argument" in str(end)) is (come is refuse) for end in ends[:2])


def test_a_rank_that_waits_under_another_name_is_named():
    for odd in range(4):
        job = Job(4)
        for rank, store in enumerate(job.stores):
            job.sessions[rank] = Coordinator(store, f"actor {rank == odd}", rank, job.ranks)
        for rank, error in enumerate(job.each(open_)):
            assert isinstance(error, RendezvousError)
            assert f"actor {rank != odd}" in str(error), (odd, rank)


def test_a_rank_that_opens_another_session_first_is_only_late():
    job = Job(3)
    names = {"left": range(2), "middle": range(1, 3)}

    def open_in_turn(session):
        for name, ranks in names.items():
            if session._rank in ranks:
                open_(Coordinator(session._shared, name, session._rank, ranks))
                job.wait(3)

    assert not any(job.each(open_in_turn))


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_error_of_a_rank_that_had_tried_alone_counts_once(culprit, later):
    """The culprit has one attempt more than the other rank."""
    job = Job(2)

    def try_alone(session):
        with pytest.raises(RendezvousError, match=rf"rank {1 - culprit} .*never arrived"):
            session.meet({}, timeout=0.5)
        Coordinator(session._shared, "job", culprit, range(2)).decline(ValueError("bad argument"))

    job.each(lambda s: s._rank == culprit and try_alone(s))
    job.begin_anew()
    ends = job.each(lambda s: s._rank == culprit or open_(s), within=5)
    (said,) = job.others(ends, culprit)
    assert "bad argument" in said
    job.begin_anew()
    assert not any(job.each(lambda s: late(job, s, later, 1) or open_(s)))


@pytest.mark.parametrize("last", range(3))
@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 0, 1), (0, 2, 2)])
def test_two_processes_as_one_rank(ranks, last):
    """They run on other hosts, where no rank can check whether a process still runs."""
    job = Job(3)
    twin = max(ranks, key=ranks.count)
    for process, rank in enumerate(ranks):
        session = Coordinator(job.stores[process], "job", rank, job.ranks)
        session._hellos.mine = replace(session._hellos.mine, pid=-1 - process, host="far")
        job.sessions[process] = session
    ends = job.each(lambda s: (s is job.sessions[last] and job.wait(2)) or open_(s), within=10)
    for said in job.others(ends, twin):
        assert f"two processes came as rank {twin}: process" in said


@any_rank
def test_a_rank_that_could_not_open_is_named(job, who):
    ends = job.each(lambda s: open_(s, OSError("no port") if s._rank == who else None), within=10)
    assert ends[who] is None
    for said in job.others([end for end in ends if end], who):
        assert f"not all could open: rank {who}: OSError: no port" in said
    job.begin_anew()
    job.opened()


@any_rank
@pytest.mark.parametrize("moment", ["before the verdict", "before it confirms"])
def test_a_rank_that_dies_between_the_steps_of_a_meeting_is_named(job, who, moment):
    def come(session):
        if session._rank != who:
            open_(session)
        elif moment == "before the verdict":
            session._arrive({"tp": "8"}, 1)
        else:
            session.meet({"tp": "8"}, timeout=TIMEOUT)

    ends = job.each(come, within=2 * TIMEOUT)
    for said in job.others([end for end in ends if end], who):
        assert f"rank {who}" in said
        assert "not confirm in time" in said


def test_a_rank_that_gave_up_before_the_others_came_is_named(job):
    def meet(session):
        if session._rank == MEMBER:
            session.meet({"tp": "8"}, timeout=2)
        job.wait(10)
        open_(session)

    job.others(job.each(meet, within=TIMEOUT + 10), MEMBER)


def test_who_gives_up_before_the_leader_names_who_is_missing(job):
    def come(session):
        late(job, session, 0, TIMEOUT)
        open_(session)

    ends = job.each(lambda s: s._rank == MEMBER or come(s), within=2 * TIMEOUT)
    job.others(ends, MEMBER)


# -- between meeting and parting -------------------------------------------------------------------


def say(session, word="", topic="talk"):
    return session.exchange(topic, word, timeout=TIMEOUT)


def test_all_get_the_same_texts_and_earlier_ones_are_deleted(job):
    job.opened()
    for turn in range(3):
        ends = job.each(lambda s, t=turn: late(job, s, t, 2) or say(s, f"{t} of {s._rank}"))
        expected = {rank: f"{turn} of {rank}" for rank in job.ranks}
        assert all(dict(heard) == expected for heard in ends)
        assert {key.split("/turn ")[1][0] for key in job.left() if "/turn " in key} == {f"{turn}"}


@any_rank
def test_a_rank_that_says_nothing_is_named(job, who):
    ends = job.opened().each(lambda s: s._rank == who or say(s))
    for said in job.others(ends, who):
        assert f"rank {who} on" in said
        assert "did not come within 20 s" in said


def test_a_leader_that_dies_before_it_answers_is_named(job):
    def come(session):
        if session._rank:
            say(session)
        else:
            session._store.set(f"{session._mine.namespace}/turn 0/0", json.dumps(["talk", ""]))

    job.others(job.opened().each(come)[1:], 0)


def test_ranks_that_came_for_different_things_get_the_names_of_the_others():
    ends = Job(3).opened().each(lambda s: say(s, topic="tea" if s._rank else "coffee"))
    assert "rank 1 came for tea; rank 2 came for tea" in str(ends[0])
    assert "rank 0 came for coffee" in str(ends[1])
    assert [end.missing for end in ends] == [(1, 2), (0,), (0,)]


@any_rank
def test_a_rank_that_leaves_is_named_at_once(job, who):
    def come(session):
        if session._rank == who:
            job.wait(5)
            return part(session, KeyError("lost")) and None
        return say(session)

    ends = job.opened().each(come, within=10)
    for said in job.others([end for end in ends if end], who):
        assert "has left: KeyError: 'lost'" in said
        assert "did not come within" not in said


@pytest.mark.parametrize(
    ("error", "named", "missing"),
    [
        (ValueError("bad batch"), {2}, (2,)),
        # This error results from another rank's failure, and torch does not name that rank.
        (GLOO, {1, 2}, (1,)),
    ],
)
def test_who_is_late_is_not_blamed_for_who_has_left(error, named, missing):
    def come(session):
        late(job, session, 1, 5)
        return part(session, error) and None if session._rank == 2 else say(session)

    job = Job(3).opened()
    first, second, _ = job.each(come, within=10)
    assert {rank for rank in range(3) if f"rank {rank}" in str(first)} == named
    assert first.missing == missing
    assert "did not come within" not in str(first)
    assert "rank 1" not in str(second)
    assert second.missing == (2,)


@pytest.mark.parametrize("step", ["exchange", "confirm", "part"])
def test_where_one_has_given_up_nobody_goes_on(job, step):
    """The other ranks come later, and by their own clocks all are in time."""

    def come(session):
        if step == "confirm":
            session.meet({}, timeout=TIMEOUT)
        if session._rank != 1:
            job.wait(10)
        arguments = ("tea", "milk") if step == "exchange" else (None,)
        timeout = 1.0 if session._rank == 1 else TIMEOUT
        return getattr(session, step)(*arguments, timeout=timeout)

    if step != "confirm":
        job.opened()
    for end in job.each(come):
        assert end if step == "part" else isinstance(end, RendezvousError)


def test_a_follower_that_gives_up_confirming_does_not_blame_the_leader():
    """The leader is present and waits for the same rank."""
    job = Job(4)

    def come(session):
        session.meet({}, timeout=TIMEOUT)
        if session._rank != 2:
            problem = RuntimeError("out of memory") if session._rank == 3 else None
            session.confirm(problem, timeout=5.0 if session._rank else TIMEOUT)

    for said in job.others(job.each(come)[:2], 2, 3):
        assert "rank 2: did not confirm in time; rank 3: RuntimeError: out of" in said


def test_of_very_many_ranks_one_reads_for_all_if_the_leader_dies(job, monkeypatch):
    monkeypatch.setattr(gathering, "MANY", 2)
    monkeypatch.setattr(rendezvous, "MANY", 2)
    read, readers = Coordinator._answers, []

    def answers(session, folder, ranks, silence):
        readers.append(session._rank)
        job.wait(2)  # meanwhile other ranks give up, too
        return read(session, folder, ranks, silence)

    monkeypatch.setattr(Coordinator, "_answers", answers)
    named = job.others(job.opened().each(lambda s: s._rank == 0 or say(s))[1:], 0)
    assert all("did not come within 20 s" in said for said in named)
    assert len([reader for reader in readers if reader]) == 1


def test_of_very_many_ranks_none_blames_who_came_if_the_leader_is_late(job, monkeypatch):
    monkeypatch.setattr(rendezvous, "MANY", 2)

    def come(session):
        late(job, session, 0, TIMEOUT)
        open_(session)

    _, *ends = job.each(lambda s: s._rank == MEMBER or come(s), within=2 * TIMEOUT)
    for end in (end for end in ends if end is not True):
        assert end.missing == ()
        assert "rank 0 on " in str(end)
        assert "did not answer in time" in str(end)


# -- parting ---------------------------------------------------------------------------------------


@any_rank
def test_a_rank_that_does_not_part_is_named(job, who):
    ends = job.opened().each(lambda s: s._rank == who or part(s))
    silent = f"did not answer (process {os.getpid()} on {socket.gethostname()})"
    assert all(end == {who: silent} for r, end in enumerate(ends) if r != who)


@any_rank
def test_the_last_word_of_a_rank_counts(job, who):
    """Ctrl-C interrupts a rank while it waits for the others, after it reported no error."""

    def come(session):
        if session._rank == who:
            session._store.multi_set(session._bye(""))
            job.wait(5)
            return part(session, KeyboardInterrupt()) and None
        late(job, session, 1, 10)
        return part(session)

    ends = job.opened().each(come)
    said = {who: "KeyboardInterrupt: "}
    assert all(end == said for rank, end in enumerate(ends) if rank != who)


def test_a_leader_with_an_error_tells_those_of_others_too(job):
    job.opened()

    def end(session):
        if session._rank == MEMBER:
            return part(session, KeyError("the cause"))
        job.wait(2 if session._rank == 0 else 4)
        return part(session, ValueError("mine") if session._rank == 0 else None)

    ends = job.each(end)
    assert all({0, MEMBER} <= set(end) for end in ends if end is not ends[MEMBER]), ends


def test_the_cause_of_an_error_is_told_to_ranks_that_failed_of_it(job):
    """A rank whose collective failed asks for the errors of the others."""

    def fail(session):
        if session._rank == 1:
            return None  # killed
        part(session, ValueError("mine") if session._rank == MEMBER else GLOO)
        return session.news(wait=2.0)

    ends = job.opened().each(fail)
    for rank in {*job.ranks} - {1, MEMBER}:
        assert ends[rank][MEMBER] == "ValueError: mine"
        assert ends[rank][1].startswith("not a word (process ")
        assert rank not in ends[rank]


def test_if_the_leader_was_killed_ranks_that_failed_of_it_name_it(job):
    ends = job.opened().each(lambda s: s._rank and part(s, GLOO) and s.news(wait=2.0))
    assert all(end[0].startswith("not a word (process ") for end in ends[1:])


# -- work in steps ---------------------------------------------------------------------------------


def work(job, session, step=lambda name: None, team=None):
    with (team or job.teams[session._rank]).begin({}) as team:
        team.agree("first", wait=False)
        team.agree("second")
        step("third")
        team.agree("third")
        team.announce("where", b"here")
        found = team.collect("written", b"%d" % team.rank * 20_000, final=True)
        team.announce("done", b"yes")
    return {rank: said[:2] for rank, said in found.items()}


def test_work_in_steps_leaves_nothing_in_the_store(job):
    first, *others = job.each(partial(work, job))
    assert first == {rank: (b"%d" % rank * 2)[:2] for rank in job.ranks}
    assert not any(others)
    assert job.left() == set()


@any_rank
@pytest.mark.parametrize("silent", [False, True])
def test_work_in_which_a_rank_fails(job, who, silent):
    def fail(rank, step):
        if rank == who:
            job.wait(10 * TEAM_TIMEOUT if silent else 0)
            raise ValueError("no ink")

    ends = job.each(lambda s: work(job, s, partial(fail, s._rank)), within=11 * TEAM_TIMEOUT)
    said = "no sign of life for 30 s" if silent else "ValueError: no ink"
    for error in job.others([*ends[:who], *ends[who + 1 :]], who):
        assert error == f"rank {who}: {said}" or error.startswith(f"rank {who}: {said};")


def test_a_busy_rank_is_not_given_up_and_gets_the_errors_of_others(job):
    def busy(session, fails):
        with job.teams[session._rank].begin({}) as team:
            if fails and team.rank == MEMBER:
                raise ValueError("no ink")
            for _ in range(60 if team.rank == 1 else 0):
                job.wait(1)
                team.progress()
            team.agree("together")

    assert not any(job.each(lambda s: busy(s, fails=False), within=60))
    ends = job.each(lambda s: busy(s, fails=True), within=60)
    job.others(ends, MEMBER)
    assert job.phase.ranks[1].ended < 10


@pytest.mark.parametrize("waiting", [(0,), (1,), (1, 2), (0, 2), ()])
def test_only_ranks_that_need_it_wait_for_a_step(waiting):
    """Some ranks wait at two steps, at which the last rank is late; all wait at the third."""
    job, seen = Job(3), {}

    def take_steps(session):
        with job.teams[session._rank].begin({}) as team:
            late(job, session, 2, 10)
            for topic in ("first", "second", "last"):
                team.agree(topic, wait=team.rank in waiting or topic == "last")
                seen[team.rank, topic] = job.simulation.monotonic()

    assert not any(job.each(take_steps))
    for (rank, topic), when in seen.items():
        assert (when >= 10) is (rank in waiting or topic == "last" or rank == 2), (rank, topic)


@pytest.mark.parametrize("moment", ["before the last report", "in time", "too late"])
def test_work_that_one_rank_cancels(job, moment):
    """After the last report of all ranks, only the leader decides."""

    def cancelled(session):
        with job.teams[session._rank].begin({}) as team:
            if team.rank == MEMBER and moment == "before the last report":
                team.cancel()
                team.progress()
            team.collect("written", b"", final=True)
            if team.leading:
                job.wait(5 if moment == "in time" else 0)
                team.heed()
            elif team.rank == MEMBER:
                job.wait(0 if moment == "in time" else 5)
                team.cancel()
            return team.announce("published", b"yes")

    ends = job.each(cancelled)
    if moment == "too late":
        assert ends == [b"yes"] * len(job.ranks)
        return
    if moment == "before the last report":
        assert isinstance(ends.pop(MEMBER), CancelledError)
    assert all(f"called off on rank {MEMBER}" in end.problems[MEMBER] for end in ends)


def test_another_work_of_the_name_may_begin_while_one_goes_on(job):
    def both(session):
        second = JointWork(job.stores[session._rank], "work", session._rank, job.ranks, timeout=20)
        with job.teams[session._rank].begin({}) as first:
            work(job, session, team=second)
            first.agree("together")

    assert not any(job.each(both))


def test_in_thousands_nobody_asks_often_and_nothing_stays_in_the_store():
    job = Job(2_000).opened()
    assert job.phase.most("calls") <= 60
    assert job.phase.most("bytes", slice(1, None)) < 10_000
    assert not any(job.each(part))
    assert job.phase.most("calls") <= 60
    assert job.left() == set()
