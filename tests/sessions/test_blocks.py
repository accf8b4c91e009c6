"""Rendezvous of very many ranks in blocks: the outcome is the same as without blocks.

The ranks are simulated, except in the last test. Each runs the real rendezvous on a store in memory
with a simulated clock.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("greenlet")

import megapg
from benchmarks.simulated import Simulation
from megapg.errors import RendezvousError
from megapg.rendezvous import blocks
from megapg.rendezvous.arrivals import BlockArrivals
from megapg.rendezvous.blocks import Blocks
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.joint_work import JointWork
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.testing import run_distributed

SIZE, LAST = 55, 54
IN_BLOCKS, FLAT = 30, SIZE  # largest number of ranks without blocks
HEAD, MEMBER, IN_FIRST = 16, 27, 5  # blocks have 8 ranks, the last one 7
LATER, LATER_HEAD = 44, 40  # a member and the head of a later block
TIMEOUT, TEAM_TIMEOUT = 20.0, 30.0
# Extra time after a timeout: followers give up on their leader in two rounds with short pauses.
GRACE = 15.0


class Died(Exception):
    """The rank is dead and does nothing more."""


class Job:
    """Simulated ranks, their work and their results."""

    def __init__(self, flat: int, size: int = SIZE) -> None:
        self.simulation = Simulation(size)
        self.stores = [self.simulation.store() for _ in range(size)]
        self.ranks = range(size)
        self.flat = flat
        self.begin_anew()
        self.teams = [
            JointWork(store, "work", rank, self.ranks, timeout=TEAM_TIMEOUT, flat=flat)
            for rank, store in enumerate(self.stores)
        ]

    def begin_anew(self) -> None:
        """Create new coordinators, as processes that open another session."""
        self.sessions = [
            Coordinator(store, "job", rank, self.ranks, flat=self.flat)
            for rank, store in enumerate(self.stores)
        ]

    def each(self, do) -> list[str]:
        """Return the result or the exception of ``do(rank)`` on each rank, as text."""
        ends = dict.fromkeys(self.ranks, "")

        def one(rank: int) -> None:
            try:
                ends[rank] = repr(do(rank))
            except Exception as error:
                ends[rank] = f"{type(error).__name__}: {error}"

        self.phase = self.simulation.phase(one)
        return [ends[rank] for rank in self.ranks]

    def wait(self, seconds: float) -> None:
        """Let time pass for the running rank."""
        self.simulation.sleep(seconds)

    def open(self, rank: int) -> None:
        self.sessions[rank].meet({"tp": "8"}, timeout=TIMEOUT)
        self.sessions[rank].confirm(None, timeout=TIMEOUT)

    def left(self) -> set[str]:
        """Return the keys left in the store, except the last message of each rank."""
        return {key for key in self.simulation.values if "/hello/" not in key}


def both_ways(do, *, within: float | None = TIMEOUT) -> list[str]:
    """Return the results of ``do(job)``, which must be the same with and without blocks."""
    flat, job = Job(FLAT), Job(IN_BLOCKS)
    by_itself, in_blocks = do(flat), do(job)
    for rank in job.ranks:
        assert in_blocks[rank] == by_itself[rank], rank
    if within is not None:
        assert job.phase.most("ended") <= within + GRACE
    return in_blocks


def others(*ranks: int) -> list[int]:
    return [rank for rank in range(SIZE) if rank not in ranks]


def test_blocks_are_of_the_root_of_their_number():
    blocks = Blocks(range(10, 3010), 1_234, 1_024)
    assert len(blocks.mine) == 55
    assert 1_234 in blocks.mine
    assert [rank for block in [blocks.leaders, *blocks.reporting()] for rank in block] == [
        *range(10, 3010)
    ]
    assert not Blocks(range(1_024), 7, 1_024).several
    scattered = [3, 1, 4, 15, 9, 2, 6]
    assert Blocks(scattered, 9, 2).mine == [15, 9, 2]
    assert Blocks(scattered, 15, 2).heading
    assert not Blocks(scattered, 3, 2).heading


@pytest.mark.parametrize("silent", [MEMBER, HEAD, IN_FIRST, 0])
def test_a_rank_that_never_comes_is_named_on_every_rank(silent):
    ends = both_ways(lambda job: job.each(lambda rank: rank == silent or job.open(rank)))
    for rank in others(silent):
        assert f"Missing: rank {silent} never arrived" in ends[rank], ends[rank]


@pytest.mark.parametrize("flat", [FLAT, IN_BLOCKS])
def test_nobody_is_blamed_that_came_where_the_leader_was_too_late_to_answer(flat):
    job, blamed = Job(flat), {}

    def come(rank):
        if rank == 0:
            job.wait(TIMEOUT)
        try:
            job.open(rank)
        except RendezvousError as error:
            blamed[rank] = error.missing
            raise

    ends = job.each(lambda rank: rank == MEMBER or come(rank))
    assert blamed.keys() == set(others(MEMBER))
    knowing = {0, *range(24, 32), *range(8, SIZE, 8)}  # the rank's block, and all heads
    for rank, missing in blamed.items():
        if flat == FLAT or rank in knowing:
            assert list(missing) == [MEMBER], (rank, missing)
        else:
            assert list(missing) == []
            assert "rank 0 on " in ends[rank]
            assert "had not answered in time" in ends[rank]


@pytest.mark.parametrize("late", [MEMBER, HEAD, 0])
def test_a_rank_may_come_late(late):
    def come(job, rank):
        if rank == late:
            job.wait(TIMEOUT - 10)
        job.open(rank)

    assert set(both_ways(lambda job: job.each(lambda rank: come(job, rank)))) == {"None"}


@pytest.mark.parametrize("odd", [[MEMBER], [HEAD], [0], [IN_FIRST], range(HEAD, HEAD + 8)])
def test_other_settings_are_named_on_every_rank(odd):
    def meet(job, rank):
        job.sessions[rank].meet({"tp": "4" if rank in odd else "8"}, timeout=TIMEOUT)

    ends = both_ways(lambda job: job.each(lambda rank: meet(job, rank)), within=10)
    assert all(
        "tp is " in end and f"4 on rank{'s' * (len(odd) > 1)} {odd[0]}" in end for end in ends
    )


def test_what_all_are_told_of_other_settings_does_not_grow_with_the_ranks():
    job = Job(1_024, 2_000)
    ends = job.each(lambda r: job.sessions[r].meet({"tp": "4" if r == 9 else "8"}, timeout=TIMEOUT))
    assert "4 on rank 9" in ends[150]
    assert job.phase.ranks[150].bytes < 10_000


def test_ranks_that_differ_in_what_they_propose_meet():
    def meet(job, rank):
        at_least = 7 if rank in (MEMBER, HEAD) else 1
        return job.sessions[rank].meet({}, timeout=TIMEOUT, at_least=at_least).generation

    assert set(both_ways(lambda job: job.each(lambda rank: meet(job, rank)), within=10)) == {"7"}


@pytest.mark.parametrize("declining", [MEMBER, HEAD, 0])
def test_nobody_waits_for_a_rank_that_declines(declining):
    def come(job, rank):
        if rank == declining:
            job.wait(10)
            job.sessions[rank].decline(ValueError("no GPU"))
        else:
            job.open(rank)

    ends = both_ways(lambda job: job.each(lambda rank: come(job, rank)), within=20)
    for rank in others(declining):
        assert f"rank {declining} on" in ends[rank]
        assert "gave up: ValueError: no GPU" in ends[rank]


@pytest.mark.parametrize("late", [LATER, LATER_HEAD])
def test_nor_does_a_rank_that_comes_when_the_others_have_gone(late):
    def come(job, rank):
        if rank == MEMBER:
            job.sessions[rank].decline(ValueError("no GPU"))
        else:
            job.wait(10 if rank == late else 0)
            job.open(rank)

    ends = both_ways(lambda job: job.each(lambda rank: come(job, rank)), within=20)
    assert "gave up: ValueError: no GPU" in ends[late]


def test_they_meet_after_one_of_them_failed_to_come():
    def twice(job):
        job.each(lambda rank: rank == MEMBER or job.open(rank))
        job.begin_anew()
        return job.each(job.open)

    assert set(both_ways(twice)) == {"None"}


def let_the_head_die_with_the_verdict(job, monkeypatch):
    """Let the head of a block die before it passes the verdict on."""
    passed_on = BlockArrivals.pass_on

    def die(block, verdict):
        if block._said.mine.nonce == job.sessions[HEAD]._mine.nonce:
            raise Died
        passed_on(block, verdict)

    monkeypatch.setattr(BlockArrivals, "pass_on", die)


def test_the_verdict_reaches_a_block_whose_head_died_with_it(monkeypatch):
    job = Job(IN_BLOCKS)
    let_the_head_die_with_the_verdict(job, monkeypatch)
    ends = job.each(lambda rank: job.sessions[rank].meet({}, timeout=TIMEOUT).generation)
    assert {ends[rank] for rank in others(HEAD)} == {"1"}
    assert "Died" in ends[HEAD]
    assert job.phase.most("ended") <= 8


def test_the_verdict_reaches_such_a_block_also_where_an_earlier_meeting_left_keys(monkeypatch):
    job = opened(IN_BLOCKS)
    job.each(lambda rank: job.sessions[rank].part(KeyError() if rank == 7 else None, timeout=1))
    job.begin_anew()

    let_the_head_die_with_the_verdict(job, monkeypatch)
    ends = job.each(lambda rank: job.sessions[rank].meet({}, timeout=TIMEOUT).generation)
    assert len({ends[rank] for rank in others(HEAD)}) == 1, set(ends)
    assert ends[0].isdigit()


def test_the_end_of_a_meeting_takes_nothing_from_the_next_one(monkeypatch):
    job = opened(IN_BLOCKS)
    leader = job.sessions[0]
    forget, reported, reports = leader._forget, BlockArrivals.look, set()

    def look(block):
        reported(block)
        if block.keys:
            reports.add(block._said.mine.attempt)

    def tidy_late(folders):
        job.wait(2)  # by now the others are in the next attempt and their heads have reported
        forget(folders)
        assert reports == {2}

    monkeypatch.setattr(BlockArrivals, "look", look)
    monkeypatch.setattr(leader, "_forget", tidy_late)

    def again(rank):
        assert job.sessions[rank].part(None, timeout=TIMEOUT) == {}
        job.open(rank)

    assert set(job.each(again)) == {"None"}
    assert job.phase.most("ended") < 2 + 5  # the leader did not wait for late heads


def test_a_head_that_reports_nothing_costs_half_of_the_time_at_most(monkeypatch):
    monkeypatch.setattr(blocks, "_RANKS_A_SECOND", 1)  # makes the wait two minutes
    job = Job(IN_BLOCKS)
    monkeypatch.setattr(BlockArrivals, "look", lambda block: None)
    for do, most in [
        (lambda rank: job.sessions[rank].meet({}, timeout=TIMEOUT) and None, TIMEOUT / 2),
        (lambda rank: job.sessions[rank].confirm(None, timeout=TIMEOUT), TIMEOUT / 2),
        (lambda rank: working(job, rank, lambda step: None) and None, 6 * TEAM_TIMEOUT / 2),
    ]:
        assert set(job.each(do)) == {"None"}
        assert job.phase.most("ended") <= most + 3
        never_reporting(job, HEAD)


@pytest.mark.parametrize("failing", [MEMBER, HEAD, IN_FIRST, 0])
def test_a_rank_that_could_not_open_is_named(failing):
    def open_(job, rank):
        session = job.sessions[rank]
        session.meet({}, timeout=TIMEOUT)
        session.confirm(OSError("no port") if rank == failing else None, timeout=TIMEOUT)

    ends = both_ways(lambda job: job.each(lambda rank: open_(job, rank)), within=10)
    for rank in others(failing):
        assert f"not all could open: rank {failing}: OSError: no port" in ends[rank]


@pytest.mark.parametrize("dead", [MEMBER, HEAD, IN_FIRST, 0])
def test_a_rank_that_dies_before_it_confirms_is_named(dead):
    def open_(job, rank):
        session = job.sessions[rank]
        session.meet({}, timeout=TIMEOUT)
        if rank != dead:
            session.confirm(None, timeout=TIMEOUT)

    ends = both_ways(lambda job: job.each(lambda rank: open_(job, rank)))
    for rank in others(dead):
        assert f"rank {dead}: did not confirm in time" in ends[rank]


def opened(flat: int) -> Job:
    job = Job(flat)
    assert set(job.each(job.open)) == {"None"}
    return job


def both_ways_once_open(do, *, within: float = TIMEOUT) -> list[str]:
    def after_opening(job):
        assert set(job.each(job.open)) == {"None"}
        return do(job)

    return both_ways(after_opening, within=within)


@pytest.mark.parametrize("late", [None, MEMBER, HEAD, 0])
def test_all_hear_the_same_words_even_those_that_differ_and_come_late(late):
    def say(job, rank):
        if rank == late:
            job.wait(TIMEOUT - 10)
        heard = {}
        for turn in range(3):
            word = f"{turn} of {rank}" if rank in (MEMBER, HEAD, 0, 7) else f"{turn}"
            heard[turn] = job.sessions[rank].exchange("talk", word, timeout=TIMEOUT)
        return {
            t: (len(h), h[MEMBER], h[HEAD], h[0], h[7], h[LAST], h[8]) for t, h in heard.items()
        }

    ends = both_ways_once_open(lambda job: job.each(lambda rank: say(job, rank)))
    assert len(set(ends)) == 1
    assert f"({SIZE}, '2 of {MEMBER}', '2 of {HEAD}', '2 of 0', '2 of 7', '2', '2')" in ends[0]


def test_what_all_have_heard_is_taken_back():
    job = opened(IN_BLOCKS)
    for turn in range(3):
        job.each(lambda rank: job.sessions[rank].exchange("talk", f"{rank}", timeout=TIMEOUT))
        assert {key.split("/turn ")[1][0] for key in job.left() if "/turn " in key} == {f"{turn}"}


@pytest.mark.parametrize("silent", [MEMBER, HEAD, IN_FIRST, 0])
def test_a_rank_that_says_nothing_is_named(silent):
    def say(job, rank):
        if rank != silent:
            job.sessions[rank].exchange("talk", "", timeout=TIMEOUT)

    ends = both_ways_once_open(lambda job: job.each(lambda rank: say(job, rank)))
    for rank in others(silent):
        assert f"rank {silent} on" in ends[rank]
        assert "did not come within 20 s" in ends[rank]


@pytest.mark.parametrize("leaving", [MEMBER, HEAD, 0])
def test_a_rank_that_leaves_is_named_at_once(leaving):
    def say(job, rank):
        if rank == leaving:
            job.wait(10)
            job.sessions[rank].part(KeyError("lost"), timeout=TIMEOUT)
        else:
            job.sessions[rank].exchange("talk", "", timeout=TIMEOUT)

    ends = both_ways_once_open(lambda job: job.each(lambda rank: say(job, rank)), within=20)
    for rank in others(leaving):
        assert f"rank {leaving} on" in ends[rank]
        assert "has left: KeyError: 'lost'" in ends[rank]


def never_reporting(job: Job, rank: int) -> None:
    """Let the rank report its own state, but nothing about its block."""
    for each in (job.sessions[rank], job.teams[rank]):
        store = each._store
        each._is_told = lambda folder, store=store: lambda: store.check([f"{folder}/all"])
    job.teams[rank]._block.add = lambda folder: None


def test_a_head_that_reports_nothing_costs_five_seconds_and_no_more():
    job = opened(IN_BLOCKS)
    never_reporting(job, HEAD)

    def say(rank):
        heard = job.sessions[rank].exchange("talk", f"{rank == MEMBER}", timeout=TIMEOUT)
        return [rank for rank, word in heard.items() if word == "True"], len(heard)

    assert set(job.each(say)) == {f"([{MEMBER}], {SIZE})"}
    assert 5 <= job.phase.most("ended") <= 8
    assert set(job.each(lambda rank: job.sessions[rank].part(None, timeout=TIMEOUT))) == {"{}"}
    assert job.left() == set()


def dozing(job: Job, ranks: Rendezvous) -> Rendezvous:
    """Let a rank pause for ten seconds before it reads a key that it has seen."""
    store = ranks._store
    read = store.multi_get

    def doze(keys):
        job.wait(10)
        return read(keys)

    store.multi_get = doze
    return ranks


def test_a_head_that_the_leader_overtakes_as_they_part_finds_what_it_was_about_to_read():
    job = opened(IN_BLOCKS)
    dozing(job, job.sessions[HEAD])
    assert set(job.each(lambda rank: job.sessions[rank].part(None, timeout=TIMEOUT))) == {"{}"}
    assert job.left() == set()


@pytest.mark.parametrize("failing", [MEMBER, HEAD, IN_FIRST, 0])
def test_what_a_rank_says_at_the_end_is_heard_also_where_it_had_said_all_was_well(failing):
    def part(job, rank):
        session = job.sessions[rank]
        if rank == failing:  # Ctrl-C while the rank waits for the others
            session._store.multi_set(session._bye(""))
            job.wait(5)
            return session.part(KeyboardInterrupt(), timeout=TIMEOUT) and None
        if rank == LATER:
            job.wait(10)
        return session.part(None, timeout=TIMEOUT)

    ends = both_ways_once_open(lambda job: job.each(lambda rank: part(job, rank)), within=20)
    for rank in others(failing):
        assert ends[rank] == f"{{{failing}: 'KeyboardInterrupt: '}}"


@pytest.mark.parametrize("dead", [MEMBER, HEAD, IN_FIRST, 0])
def test_a_rank_that_does_not_part_is_named(dead):
    def part(job, rank):
        return rank == dead or job.sessions[rank].part(None, timeout=TIMEOUT)

    ends = both_ways_once_open(lambda job: job.each(lambda rank: part(job, rank)))
    for rank in others(dead):
        assert ends[rank] == f"{{{dead}: 'did not answer'}}"


# -- work in steps ---------------------------------------------------------------------------------


def working(job: Job, rank: int, step) -> object:
    with job.teams[rank].begin({}) as team:
        team.agree("first", wait=False)
        team.agree("second")
        step("third")
        team.agree("third")
        team.announce("where", b"here")
        found = team.collect("written", b"%d" % rank * (20_000 if rank == HEAD else 1), final=True)
        step("last")
        team.announce("done", b"yes")
    return [found[r][:3] for r in (0, MEMBER, HEAD, LAST)] + [len(found)] if found else None


@pytest.mark.parametrize("reporting", [True, False])
def test_work_in_steps(reporting):
    def work(job):
        if not reporting and job.sessions[0]._blocks.several:
            never_reporting(job, HEAD)
        return job.each(lambda rank: working(job, rank, lambda step: None))

    ends = both_ways(work)
    assert ends[0] == f"[b'0', b'{MEMBER}', b'161', b'{LAST}', {SIZE}]"
    assert set(ends[1:]) == {"None"}


def test_a_head_whose_reports_came_too_late_reports_what_follows(monkeypatch):
    job, reporting = Job(IN_BLOCKS), []
    block = job.teams[HEAD]._block
    report = block.report
    monkeypatch.setattr(block, "report", lambda: report() if reporting else set())

    def step(rank: int, name: str) -> None:
        if rank == HEAD and name == "third":
            reporting.append(name)

    job.each(lambda rank: working(job, rank, lambda name: step(rank, name)))
    # The leader waited twice for this head, and then read the members' reports itself.
    assert 10 <= job.phase.most("ended") <= 14


@pytest.mark.parametrize("size", [1, 100_000])  # the larger message is stored in pieces
def test_a_head_that_the_leader_overtakes_at_work_finds_what_it_was_about_to_read(size):
    job = Job(IN_BLOCKS)
    dozing(job, job.teams[HEAD])

    def work(rank):
        with job.teams[rank].begin({}) as team:
            team.collect("planned", b"1" * (size if rank == MEMBER else 1))
            team.agree("planned by all")
            found = team.collect("written", b"2" * (size if rank == MEMBER else 1), final=True)
            team.announce("done")
            return len(found.get(MEMBER, b""))

    assert job.each(work) == [str(size), *["0"] * (SIZE - 1)]
    assert job.left() == set()


def test_work_leaves_nothing_in_the_store():
    job = Job(IN_BLOCKS)
    job.each(lambda rank: working(job, rank, lambda step: None))
    assert job.left() == set()


@pytest.mark.parametrize("failing", [MEMBER, HEAD, IN_FIRST, 0])
@pytest.mark.parametrize("silent", [False, True])
def test_work_in_which_a_rank_fails(failing, silent):
    def fail(job, rank, step):
        if rank == failing and step == "third":
            if silent:
                job.wait(10 * TEAM_TIMEOUT)
            raise ValueError("no ink")

    ends = both_ways(
        lambda job: job.each(lambda rank: working(job, rank, lambda step: fail(job, rank, step))),
        within=None,
    )
    said = "no sign of life for 30 s" if silent else "ValueError: no ink"
    for rank in others(failing):
        assert f"OthersFailedError: rank {failing}: {said}" in ends[rank]


def test_in_thousands_nobody_handles_more_than_the_root_and_nothing_stays_in_the_store():
    size = 2_000
    job, root = Job(1_024, size), math.sqrt(size)
    assert set(job.each(job.open)) == {"None"}
    assert job.phase.most("calls") <= root
    assert job.phase.most("keys") <= 100 * root
    ends = job.each(lambda rank: job.sessions[rank].part(None, timeout=TIMEOUT))
    assert set(ends) == {"{}"}
    assert job.left() == set()


# -- real ranks ------------------------------------------------------------------------------------


def sessions_in_blocks() -> tuple[float, list[str]]:
    """Run a whole session on six ranks, then a session that the head of a block can't open."""
    for kind in (Rendezvous, JointWork):  # changes this process only, which ends with the test
        kind.__init__.__kwdefaults__["flat"] = 2
    rank, told = int(os.environ["RANK"]), []
    with megapg.session(tp=2, timeout=TIMEOUT) as session:
        session.suspend("recreate")
        session.resume()
        total = torch.ones(1)
        dist.all_reduce(total, group=session.groups.dp)
        coordinator = session._coordinator
        assert coordinator._blocks.several
        assert list(coordinator._blocks.mine) == ([0, 1, 2] if rank < 3 else [3, 4, 5])
        heard = coordinator.exchange("talk", f"of {rank}", timeout=TIMEOUT)
        assert heard == {each: f"of {each}" for each in range(6)}
    try:
        megapg.session(tp=5 if rank == 3 else 2, timeout=TIMEOUT)
    except megapg.MegapgError as error:
        told.append(str(error))
    return float(total), told


def test_real_sessions_in_blocks():
    ends = run_distributed(sessions_in_blocks, 6, deadline=120)
    assert [total for total, _ in ends] == [3.0] * 6
    for rank, (_, told) in enumerate(ends):
        assert len(told) == 1
        assert rank == 3 or "rank 3" in told[0], told
